"""A module around another that shows the inner one's keys, parameters and attributes, as if it were not there."""

from __future__ import annotations

import copyreg
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.parallel import surroundings

_DDP = "module."  # what DistributedDataParallel puts before each key
_INSTEAD = {  # of what DistributedDataParallel has
    "join": "train inside `with model.uneven():`",
    "join_hook": "train inside `with model.uneven():`",
    "register_comm_hook": "wire='bfloat16' halves the bytes; gossamer.hooks are for torch's own DDP",
}
# What Hugging Face's Trainer asks of the model that it is given. It would drop all columns of the data, which are no arguments of this
# forward, and put torch's DDP around it.
_TRAINERS = "accepts_loss_kwargs"


class Wrapper(nn.Module):
    module: nn.Module
    is_copy: bool

    def _show(self, module: nn.Module) -> None:
        self.module = module
        bare = self._bare()
        for own in ("_parameters", "_buffers", "_non_persistent_buffers_set"):  # some code walks modules and looks at these
            self.__dict__[own] = getattr(bare, own)

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and ``torch.save``: the model, but not its place among the workers. For an EMA, or a frozen target network."""
        return copyreg.__newobj__, (type(self),), {"module": self.module, "training": self.training}  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        self._show(state["module"])
        self.__dict__.update(training=state["training"], _exchange=None, is_copy=True)

    def _refuse_busy(self, what: str) -> None:
        """An error if parameters must not be changed now."""

    def _bare(self) -> nn.Module:
        return getattr(self.module, "_orig_mod", self.module)  # torch.compile wraps the module once more

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The bare module's keys, so that checkpoints are those of a single-process run."""
        surroundings.guard_dcp()
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

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self._bare().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self._bare().named_buffers(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return self._bare().named_children()

    def children(self) -> Iterator[nn.Module]:
        """The module itself: by way of it torch's own ``train()``, ``apply()`` and ``to()`` reach all of its parts."""
        yield self.module

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self._bare().named_modules(memo, prefix, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "module" not in self._modules:
                raise
            if name == _TRAINERS:
                raise GossamerError(
                    f"Hugging Face's Trainer was given a {type(self).__name__}; give the bare model to "
                    "gossamer.integrations.transformers.GossamerTrainer(graph=…, model=…), which wraps it; a Trainer that only evaluates "
                    "takes the model's .module"
                ) from None
            inner = self._modules["module"]
            if name in _INSTEAD and not hasattr(inner, name):
                raise AttributeError(f"{type(self).__name__} has no {name}(): {_INSTEAD[name]}") from None
            return getattr(inner, name)
