"""Which norm normalizes the output of which layer, by the flow of data."""

from __future__ import annotations

from collections import Counter

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torch_odt.adapt.tracing import LayerTracer
from torch_odt.errors import CaptureError


def norms_behind(model: nn.Module, kind: type[nn.Module] = _BatchNorm) -> dict[str, str]:
    """The name of the norm that alone takes a layer's output, by the layer's name.

    Layers that run more than once, or whose output or tensors something else takes as well, are not there.

    Args:
        kind: of norms.

    Raises:
        CaptureError: `torch.fx` cannot follow the model, because its code depends on data.

    Example:
        >>> norms_behind(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)))
        {'0': '1'}
    """
    try:
        graph = LayerTracer().trace(model)
    except Exception as error:
        raise CaptureError(f"torch.fx cannot follow {type(model).__name__}: {error}") from error
    modules = dict(model.named_modules(remove_duplicate=False))
    calls = [node for node in graph.nodes if node.op == "call_module"]
    times = Counter(id(modules[str(node.target)]) for node in calls)
    read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    found = {}
    for node in calls:
        norm, source = modules[str(node.target)], node.args[0] if node.args else None
        if not isinstance(norm, kind) or not isinstance(source, fx.Node) or source.op != "call_module":
            continue
        layer = modules[str(source.target)]
        is_alone = len(source.users) == 1 and times[id(layer)] == times[id(norm)] == 1
        if is_alone and read.isdisjoint((str(source.target), str(node.target))):
            found[str(source.target)] = str(node.target)
    return found
