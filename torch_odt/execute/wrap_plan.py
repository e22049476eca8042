"""What `wrap` decided, for people: the budget, the graphs, and what was not possible and why."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch_odt.runtime.budget import format_bytes


@dataclass
class WrapPlan:
    """The plan of a wrapped model; it changes as steps are seen.

    Attributes:
        budget: the budget in words.
        planner: the planner's name.
        growth_bytes: what the budget leaves above the level at which the model was wrapped.
        tracing_bytes: what tracing left behind.
        reserved_bytes: kept free for what `wrap` cannot see (the loss, operators outside of the graphs).
        optimizer_bytes: kept free for the optimizer's state until it exists.
        is_optimizer_known: the optimizer was found among the objects of the process; otherwise it is taken for Adam.
        is_reserve_measured: whether that comes from a step that ran, or from the size of the model's results.
        graphs: for each graph of the last planned step, its number of forward and backward ops.
        predicted_bytes: the planned peak of the graphs together, above the level before a step.
        recompute_seconds: predicted time of what runs twice.
        graph_breaks: why the model is in more than one graph; operators between them run plainly.
        notes: what the captures and the rewrites did, and what was not possible.
        fallback: why the model could not be captured at all, so that checkpointed submodules run instead.
    """

    budget: str
    planner: str
    growth_bytes: int
    tracing_bytes: int = 0
    reserved_bytes: int = 0
    is_reserve_measured: bool = False
    optimizer_bytes: int = 0
    is_optimizer_known: bool = False
    graphs: list[tuple[int, int]] = field(default_factory=list)
    predicted_bytes: int = 0
    recompute_seconds: float = 0.0
    graph_breaks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fallback: str = ""

    def __str__(self) -> str:
        lines = [
            f"budget            {self.budget}, {format_bytes(max(0, self.growth_bytes))} above the level when wrapped",
            f"predicted peak    {format_bytes(self.predicted_bytes)} in {len(self.graphs)} graphs, by {self.planner!r}",
            f"recomputation     {self.recompute_seconds * 1e3:.1f} ms per step",
            f"tracing           {format_bytes(self.tracing_bytes)}",
            f"reserved          {format_bytes(self.reserved_bytes)} for the loss and what lies outside of the graphs, "
            + ("measured" if self.is_reserve_measured else "estimated from the results"),
            f"optimizer         {format_bytes(self.optimizer_bytes)} for state that does not exist yet, "
            + ("of the optimizer that was found" if self.is_optimizer_known else "as for Adam: no optimizer was found"),
        ]
        lines += [
            f"graph             {forward} forward ops, {backward} backward ops" for forward, backward in self.graphs
        ]
        lines += [f"graph break       {reason}" for reason in self.graph_breaks]
        lines += [f"not captured      {self.fallback}"] if self.fallback else []
        lines += [f"note              {note}" for note in self.notes]
        return "\n".join(lines)
