import json
import platform
import subprocess
import sys

import torch

from flexmarl.events.machine import this_machine


def test_the_machine_is_described_in_plain_json():
    facts = json.loads(json.dumps(this_machine().as_json()))
    assert facts["cores"] >= 1
    assert 0 < facts["free_memory_gib"] <= facts["memory_gib"]
    assert facts["python"] == platform.python_version()
    assert torch.__version__.startswith(facts["torch"].split("+")[0])
    assert len(facts["devices"]) == torch.cuda.device_count()


def test_the_machine_module_does_not_import_torch():
    code = "import sys, flexmarl.events.machine; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_broken_torch_is_a_finding():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from flexmarl.events.machine import this_machine\n"
        "machine = this_machine(); print(machine.torch, machine.torch_error, machine.devices)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "ModuleNotFoundError" in shown
