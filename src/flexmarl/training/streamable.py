"""Decides whether a policy's rows may be trained before their advantages are known (docs/math.md, Streaming credit).

Two gradient sums per credit group can replace all advantages A = scale c + offset, if a row's gradient is A times its
gradient for A = 1. On-policy, every loss of the table satisfies this: the ratio is 1, so no bound acts, and the
gradient is that of -A lp. The reported loss must be linear in A too, and that of `sapo` is not: it weighs the signs of
A differently.
"""

from flexmarl.training.settings import TrainingSettings

LINEAR_LOSSES = frozenset({"reinforce", "gpg", "ppo", "gspo", "cispo", "gmpo"})


def obstacle(training: TrainingSettings) -> str:
    """The setting that keeps streaming credit from being exact, and what would work; empty if there is none."""
    loss = getattr(training.loss, "type", "")
    if loss not in LINEAR_LOSSES:
        return f"loss.type is '{loss}', whose value is not linear in the advantage; use {_any_of(LINEAR_LOSSES)}"
    if training.loss.aggregation == "traj-mean-token-mean":
        return "loss.aggregation is 'traj-mean-token-mean', which has to know all rows of an episode that are trained"
    if getattr(training.correction, "type", "") != "none":
        return "correction is set, which streaming credit does not measure; use correction.type=none"
    terms = {"kl": training.kl, "entropy_coef": training.entropy_coef, "critic": training.critic}
    for name, term in terms.items():
        if term:
            return f"{name} adds a term that no advantage multiplies; leave it out"
    return ""


def _any_of(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))
