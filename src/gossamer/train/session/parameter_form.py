"""Parameter form: refuses parameters whose shapes, dtypes and devices are not those for which buckets were made."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch.nn import Parameter

from gossamer.errors import AttachError, LayoutError
from gossamer.train.engine.extension import Extension


class ParameterForm(Extension):
    """Refuses parameters that are not any more what they were when the session laid them out."""

    order = 2

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._kept = [(name, each, each.dtype, each.device) for name, each in parameters.items()]

    def pass_began(self) -> None:
        """Raise LayoutError where the model was moved or cast, as by model.double()."""
        for name, parameter, dtype, device in self._kept:
            if parameter.dtype is not dtype or parameter.device != device:
                raise LayoutError(
                    f'"{name}" was {dtype} on {device} at attach and is {parameter.dtype} on {parameter.device} now, '
                    "and the buffers in which it is averaged are not, so the ranks would part without a word. Write "
                    "model.to(...) before gossamer.attach(model, optimizer); in mid-run call session.close() first, "
                    "and attach again."
                )

    def refuse_unnamed(self, names: Collection[str], parameters: Mapping[str, Parameter]) -> None:
        """Raise where `names`, given to reset, are not all of `parameters` whose shape is another now."""
        if unknown := [name for name in names if not isinstance(name, str) or name not in parameters]:
            raise AttachError(
                f"the model has no trainable parameters {unknown}. Names are those of model.named_parameters(), each "
                "an argument of its own: session.reset_compressor_state('head.weight', 'head.bias')."
            )
        changed = [name for name, p in parameters.items() if name not in names and p.shape != self._shapes.get(name)]
        if changed:
            raise LayoutError(f"{changed} have other shapes now, too. Name them in the same call: reset('a', 'b').")
