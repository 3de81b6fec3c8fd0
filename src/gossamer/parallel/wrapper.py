"""A module around another that shows the inner one's keys, parameters and attributes, as if it were not there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_DDP = "module."  # what DistributedDataParallel puts before each key


class Wrapper(nn.Module):
    module: nn.Module

    def _refuse_busy(self, what: str) -> None:
        """An error if parameters must not be changed now."""

    def _bare(self) -> nn.Module:
        return getattr(self.module, "_orig_mod", self.module)  # torch.compile wraps the module once more

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The bare module's keys, so that checkpoints are those of a single-process run."""
        return self._bare().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """``assign`` makes no difference: values are copied to where the parameters are. A state that torch's DDP has saved, with
        ``module.`` before each key, is taken as well."""
        self._refuse_busy("load_state_dict()")
        bare = self._bare()
        if (
            state_dict
            and all(key.startswith(_DDP) for key in state_dict)
            and not any(key.startswith(_DDP) for key in bare.state_dict())
        ):
            state_dict = {key.removeprefix(_DDP): value for key, value in state_dict.items()}
        return bare.load_state_dict(state_dict, strict=strict)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """As a part of a larger module, whose state has the bare module's keys too: torch looks for them one module deeper."""
        for key in [key for key in state_dict if key.startswith(prefix)]:
            compiled = "_orig_mod." if self._bare() is not self.module else ""
            state_dict[f"{prefix}module.{compiled}{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self._bare().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self._bare().named_buffers(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "module" not in self._modules:
                raise
            return getattr(self._modules["module"], name)
