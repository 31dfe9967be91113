"""Our estimators per token and per environment step give what those of Dr.MAS, verl and PettingLLMs gave."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flexmarl.credit.estimators.baselines import ReinforcePP
from flexmarl.credit.estimators.gae import Gae
from flexmarl.credit.estimators.gigpo import GiGpo
from flexmarl.credit.interface import Credit, CreditRow
from flexmarl.credit.order import whitened
from flexmarl.credit.returns import generalised_advantages
from tests.unit.credit.test_golden import TOLERANCE, batch_rows, golden

PROJECTS = ("drmas", "verl", "pettingllms")
GIGPO = [(mode, similar) for mode in ("mean_norm", "mean_std_norm") for similar in (False, True)]


def rows_with(**fields: Any) -> tuple[dict[str, Any], list[CreditRow]]:
    """The batch, its rows having what an array of the batch holds at their sampled tokens."""
    batch, rows = batch_rows()
    return batch, [
        replace(row, **{name: tuple(batch[array][i, : row.num_tokens].tolist()) for name, array in fields.items()})
        for i, row in enumerate(rows)
    ]


def padded(rows: list[CreditRow], tokens) -> np.ndarray:
    """[B, T] as in the files, with 0 where the mask is 0."""
    found = np.zeros((len(rows), 6))
    for i, row in enumerate(rows):
        found[i, : row.num_tokens] = tokens[row.sample_id]
    return found


def advantages(credit: Credit, rows: list[CreditRow]) -> np.ndarray:
    return padded(rows, credit.token_advantages)


@pytest.mark.parametrize("project", PROJECTS)
@pytest.mark.parametrize("where", [{}, {"token_rewards": "tlr"}])
def test_reinforce_pp_is_that_of_all_three(project: str, where: dict[str, str]) -> None:
    _, rows = rows_with(**where)
    ours = advantages(ReinforcePP(gamma=0.9, whiten="batch").estimate(rows), rows)
    np.testing.assert_allclose(ours, golden(project)["rfpp"], rtol=0, atol=TOLERANCE)


def test_gae_is_the_one_of_verl_that_skips_what_was_not_sampled() -> None:
    batch, rows = rows_with(values="values")
    credit, theirs = Gae(gamma=0.99, lam=0.95, whiten="batch").estimate(rows), golden("verl")
    for ours, array in ((advantages(credit, rows), "gae"), (padded(rows, credit.returns), "gae_ret")):
        np.testing.assert_allclose(ours, theirs[array] * batch["mask"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("project", ["drmas", "pettingllms"])
def test_the_form_of_the_other_two_is_ours_with_values_of_padding_counted_as_those_of_tokens(project: str) -> None:
    batch, theirs = golden("batch"), golden(project)
    old = np.array(
        [
            generalised_advantages(rewards, values, gamma=0.99, lam=0.95)
            for rewards, values in zip(batch["tlr"].astype(float), batch["values"].astype(float), strict=True)
        ]
    )
    np.testing.assert_allclose(old + batch["values"], theirs["gae_ret"], rtol=0, atol=TOLERANCE)
    sampled = batch["mask"] == 1
    np.testing.assert_allclose(whitened(old[sampled]), theirs["gae"][sampled], rtol=0, atol=TOLERANCE)
    assert np.abs(theirs["gae"] - golden("verl")["gae"])[sampled].max() > 0.1


@pytest.mark.parametrize(("mode", "similar"), GIGPO)
def test_gigpo_is_that_of_dr_mas(mode: Any, similar: bool) -> None:
    batch, rows = batch_rows()
    # Its step scores are given ready made: each call has a step of its own, and nothing follows it.
    rows = [
        replace(row, tags={"anchor": str(anchor), "env_step": row.hop, "step_reward": float(score)})
        for row, anchor, score in zip(rows, batch["anchor"], batch["step_reward"], strict=True)
    ]
    ours = GiGpo(mode=mode, similarity=0.9 if similar else None, gamma=0.0).estimate(rows).advantages
    found = np.array([ours[row.sample_id] for row in rows])[:, None] * batch["mask"]
    np.testing.assert_allclose(found, golden("drmas")[f"gigpo__{mode}__sim{similar}"], rtol=0, atol=TOLERANCE)


def test_every_array_of_these_estimators_is_compared() -> None:
    there = {array for project in PROJECTS for array in golden(project) if array.startswith(("rfpp", "gae", "gigpo"))}
    compared = {"rfpp", "gae", "gae_ret", *(f"gigpo__{mode}__sim{similar}" for mode, similar in GIGPO)}
    assert {array for array in there if not array.startswith("rfpp_base")} == compared
