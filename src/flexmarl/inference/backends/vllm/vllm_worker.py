"""Weight transfer `flexmarl` for vLLM's workers, and what keeps vLLM's processes from outliving their engine's.

vLLM loads `register` in each of its processes, as the entry point `flexmarl` of the group `vllm.general_plugins`.
It imports little: vLLM's environment may have other versions of what flexmarl needs elsewhere.
"""

import ctypes
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports] - the extra
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)

from flexmarl.inference.backends.vllm.handed_weights import adapter_in, handed_tree
from flexmarl.inference.backends.vllm.vllm_start import OWNER
from flexmarl.objects.interface import checksum, names_checksum

_PR_SET_PDEATHSIG = 1
_HEAD, _EMBEDDINGS = "lm_head.weight", ("embed_tokens.weight", "wte.weight", "embed_in.weight")


def register() -> None:
    """Makes the transfer known to vLLM, in each of its processes; those of our engine end with their parent."""
    with suppress(ValueError):  # It is known already: vLLM may call this twice.
        WeightTransferEngineFactory.register_engine("flexmarl", FlexmarlTransfer)
    owner = os.environ.get(OWNER)
    if owner is not None and int(owner) != os.getpid():
        _ignore_missing_shared_memory()
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # It died in between, and no signal comes.
            os._exit(1)


def _ignore_missing_shared_memory() -> None:
    """Lets vLLM unlink shared memory whose name its engine has removed already (`unlink_shared_memory`)."""
    unlink = SharedMemory.unlink

    def if_there(self: SharedMemory) -> None:
        with suppress(FileNotFoundError):
            unlink(self)

    SharedMemory.unlink = if_there


@dataclass
class NoInit(WeightTransferInitInfo):
    """Nothing: each update says where its weights are."""


@dataclass
class HandedUpdate(WeightTransferUpdateInfo):
    """One version of the weights."""

    address: dict[str, Any]
    """Address of a tree in memory of this machine (handed_weights.py)."""
    verify: str
    """The part that the digest covers, `full` or `names`."""


class FlexmarlTransfer(WeightTransferEngine[NoInit, HandedUpdate]):
    """Loads whole versions, which vLLM packs anew between `start_weight_update` and `finish_weight_update`.

    vLLM's own `load_weights` on packed layers tears the weights, and its own checksums are of emptied tensors. The
    digest here is that of the tensors that were given to the layers.
    """

    init_info_cls: ClassVar[type[NoInit]] = NoInit
    update_info_cls: ClassVar[type[HandedUpdate]] = HandedUpdate
    digest = ""
    """The digest of the last version; empty if its load failed."""

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """Does nothing."""

    def start_weight_update(self) -> None:
        """Takes the layers apart, so that they can be loaded as from a checkpoint."""
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            initialize_layerwise_reload,
        )

        self.digest = ""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads the version. `finish_weight_update` waits for what an accelerator still copies."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: HandedUpdate) -> None:
        """Loads the version, and keeps its digest.

        A trainer publishes tied weights once. vLLM packs a tied head as a layer of its own, which would go on serving
        the old weights without an error: it gets them under its own name.
        """
        tree = handed_tree(update_info.address)
        digest = checksum(tree) if update_info.verify == "full" else names_checksum(tree)
        if _HEAD not in tree and getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            if (embedding := next((name for name in tree if name.endswith(_EMBEDDINGS)), None)) is None:
                raise ValueError(f"the head is tied, and no tensor is called {' or '.join(_EMBEDDINGS)}")
            tree[_HEAD] = tree[embedding]
        named = {name for name, _ in self.model.named_parameters()}
        loaded = self.model.load_weights(tree.items())  # A layer that it gives nothing would keep its old weights.
        if loaded is not None and self.model_config.quantization is None and (missing := sorted(named - loaded)):
            raise ValueError(f"vLLM finds no weights of {missing[0]} and {len(missing) - 1} more in what was published")
        self.digest = digest

    def finish_weight_update(self) -> None:
        """Packs the layers again."""
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            finalize_layerwise_reload,
        )

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held."""


class FlexmarlWorker:
    """Methods that vLLM's worker class gets besides its own."""

    weight_transfer_engine: FlexmarlTransfer

    def flexmarl_digest(self) -> str:
        """The digest of the version that this worker has loaded last; empty if the load failed."""
        return self.weight_transfer_engine.digest

    def flexmarl_adapter_digest(self, folder: str, verify: str) -> str:
        """The digest of the adapter in a folder, read from the files from which vLLM loads it."""
        tree = adapter_in(Path(folder)).as_tree()
        return checksum(tree) if verify == "full" else names_checksum(tree)
