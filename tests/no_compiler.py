"""Imported by a worker that only trains: its optimizer does not load torch's compiler, which takes as long as all of torch.

What torch asks the compiler for does nothing in a program that compiles nothing."""

import sys
import types

if "torch._dynamo" not in sys.modules:
    _dynamo = types.ModuleType("torch._dynamo")
    _dynamo.disable = lambda function, *_, **__: function  # by an optimizer
    _dynamo.graph_break = lambda: None
    _dynamo.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)  # by a new process group
    sys.modules["torch._dynamo"] = _dynamo
