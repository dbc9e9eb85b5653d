"""Checkpoint in, engine out: the stages of a build in order (docs/design.md, section 4)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pelton import nn
from pelton.builder.budget import Budget, kv_bytes_per_token, plan_budget
from pelton.builder.calls import Program, Root, extract
from pelton.builder.check import check_engine
from pelton.builder.directory import check_output, engine_directory
from pelton.builder.eager import EagerReference
from pelton.builder.facts import (
    checkpoint_facts,
    expected_tensors,
    model_config,
    model_recipes,
    quant_elements,
    tied_head,
)
from pelton.builder.lower import arena_lower_bound, lower
from pelton.builder.peak import PeakMemory
from pelton.builder.probe import probe_steps
from pelton.builder.report import BuildReport, MemoryReport, PassReport, QualityReport, TacticReport
from pelton.builder.resolve import resolve
from pelton.builder.tactics import Choice, choose
from pelton.builder.trace import trace
from pelton.builder.weights import WeightSpec, stored_bytes, stored_quant, write_weights
from pelton.dtypes import is_dense
from pelton.engine.artifact import FORMAT_VERSION, NATIVE_ABI, TARGET, FileEntry, Manifest, file_sha256
from pelton.engine.config import BuildConfig, EngineConfig, MemoryPlan
from pelton.engine.plan import Plan
from pelton.engine.session import Session
from pelton.ir.evaluate import infer_quant
from pelton.ir.graph import Graph
from pelton.ir.recipe import Recipe
from pelton.kernels.tactic import all_tactics
from pelton.models.checkpoint import open_checkpoint
from pelton.models.checkpoint.base import Checkpoint, check_tensors
from pelton.models.registry import architecture_of, create_model
from pelton.passes import GRAPH_PASSES, MODEL_PASSES, PassContext, run_graph_passes, run_model_passes
from pelton.version import __version__

#: ``progress(stage, done, total)``: ``total`` is 0 where it is not known.
Progress = Callable[[str, int, int], None]
