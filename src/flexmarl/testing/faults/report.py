"""Puts a tally into words: a table of the kinds of faults, and how to see a failure again."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from flexmarl.testing.faults.fault_plan import DRAWN
from flexmarl.testing.faults.laws import LAWS
from flexmarl.testing.faults.trials import Caught, Tally
from flexmarl.testing.faults.witness import COMBINATIONS


def fault_table(tally: Tally) -> Table:
    """Which faults struck, and were noticed; which laws held."""
    table = Table(
        title=f"{tally.seeds} runs, {tally.lives} lives, {tally.seconds:.0f} s, {tally.repeated} played twice"
    )
    for name in ("fault", "struck", "witnessed"):
        table.add_column(name, justify="left" if name == "fault" else "right")
    for kind in DRAWN:
        table.add_row(kind.value, str(tally.struck[kind.value]), str(tally.answered[kind.value]))
    table.add_section()
    for name in COMBINATIONS:
        table.add_row(name, "", str(tally.combined[name]))
    table.add_section()
    for law in (*LAWS, "repeat"):
        broken = sum(law in laws for laws in tally.broken.values())
        table.add_row(f"law {law}", str(tally.seeds), f"{broken} broken" if broken else "held")
    return table


def failure_lines(tally: Tally, most: int = 10) -> Iterator[str]:
    """The first failures, and how to see each again."""
    for seed, laws in sorted(tally.broken.items())[:most]:
        for law, because in laws.items():
            yield f"seed {seed} breaks law {law}: {because[0]}"
        yield f"    again: python -m flexmarl.testing.faults --seeds {seed}:{seed + 1} --jobs 1"


def mutation_table(caught: Sequence[Caught]) -> Table:
    """Which broken rules were noticed, by which laws."""
    table = Table(title="rules broken on purpose")
    for name in ("mutation", "what it breaks", "seed", "laws", "the first word of it"):
        table.add_column(name)
    for one in caught:
        seed = "NOT CAUGHT" if one.seed is None else str(one.seed)
        table.add_row(one.name, one.breaks, seed, ", ".join(one.laws), one.because)
    return table
