"""Checkpoint on disk, damaged as a crash or a bad disk would."""

from pathlib import Path

from flexmarl.orchestrator.sealed_folder import MANIFEST
from flexmarl.testing.faults.fault_plan import Fault
from flexmarl.testing.faults.injection import Injection


def tear(injection: Injection, folder: Path) -> Fault | None:
    """Damages the newest checkpoint, if a plan says so and there is one; the fault, if it did."""
    newest = max(folder.glob("step-*"), default=None)
    fault = injection.tears() if newest else None
    if newest is None or fault is None:
        return None
    victim = min(newest.rglob("trainer.json"))
    if fault.how == "truncated":
        victim.write_bytes(victim.read_bytes()[:-3])
    elif fault.how == "flipped":
        victim.write_bytes(victim.read_bytes().replace(b'"weight"', b'"eeight"'))
    elif fault.how == "unsealed":
        (newest / MANIFEST).unlink()
    else:
        newest.rename(newest.with_name(f".partial-{newest.name}"))
    return fault
