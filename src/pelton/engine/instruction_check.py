"""Whether each instruction of a plan gives its kernel what the kernel trusts: known op and tactics, the
right operands, attributes and workspace."""

from __future__ import annotations

import math

from pelton.engine.config import EngineConfig
from pelton.engine.op_rules import RULES, Bound, Rule, Term, bind
from pelton.engine.plan import Buffer, Instruction, Operand, Plan
from pelton.kernels.tactic import NodeSpec, Tactic, TensorSpec, shipped_tactics


def check_instruction(instruction: Instruction, plan: Plan, config: EngineConfig) -> None:
    """Raise ``ValueError`` saying what is wrong. Operands have been checked by themselves."""
    name, op = instruction.name, instruction.op
    if any(not isinstance(a, str) and not math.isfinite(a) for a in instruction.attrs.values()):
        raise ValueError(f"instruction {name} has an attribute that is no number")
    check_limits(instruction, plan)
    native = [choice for choice in instruction.tactics if choice.tactic not in plan.external]
    if not native:
        return  # the reference, or code that runs only with trust
    rule = RULES.get(op)
    if rule is None:
        raise ValueError(f"instruction {name} is of op {op}, which is not known")
    _check_operands(instruction, rule, plan, config)
    known = shipped_tactics(op)
    spec = _node_spec(instruction, plan, config)
    for choice in native:
        tactic = known.get(choice.tactic)
        if tactic is None:
            raise ValueError(f"instruction {name} has tactic {choice.tactic}, which op {op} does not have")
        _check_tactic(instruction, tactic, spec, plan, min(choice.max_tokens, plan.dims["T"]))


def check_limits(instruction: Instruction, plan: Plan) -> None:
    """Raise ``ValueError`` where some step has no tactic."""
    limits = [choice.max_tokens for choice in instruction.tactics]
    if limits and (limits != sorted(limits) or not plan.dims["T"] <= limits[-1] < 1 << 31):
        raise ValueError(
            f"the tactics of instruction {instruction.name} do not cover steps of {plan.dims['T']} tokens"
        )


def _check_operands(instruction: Instruction, rule: Rule, plan: Plan, config: EngineConfig) -> None:
    name = instruction.name
    inputs = [plan.operands[i] if i >= 0 else None for i in instruction.inputs]
    outputs = [plan.operands[i] for i in instruction.outputs]
    if len(inputs) != len(rule.inputs) or len(outputs) != len(rule.outputs):
        raise ValueError(f"instruction {name} ({instruction.op}) has the wrong number of operands")
    if tuple(instruction.attrs) != rule.attrs:
        raise ValueError(
            f"instruction {name} ({instruction.op}) has attributes {', '.join(instruction.attrs) or 'none'} "
            f"instead of {', '.join(rule.attrs) or 'none'}"
        )
    if any(isinstance(a, int) and not 0 <= a < 1 << 31 for a in instruction.attrs.values()):
        raise ValueError(f"instruction {name} has an attribute that is negative or too large")
    bound: Bound = {}
    groups = set()
    for term, operand in (*zip(rule.inputs, inputs, strict=True), *zip(rule.outputs, outputs, strict=True)):
        if operand is None:
            if not term.optional:
                raise ValueError(f"instruction {name} lacks its operand {term.name}")
            continue
        buffer = plan.buffers[operand.buffer]
        _check_memory(name, term, operand, buffer)
        if buffer.group >= 0:
            groups.add((buffer.group, buffer.layer))
        elif "." in buffer.name and buffer.kind == "input":
            groups.add((int(buffer.name.rpartition(".")[2]), -1))
        if rule.matches is None and not bind(term, operand.shape, bound):
            raise ValueError(
                f"instruction {name} ({instruction.op}): {operand.name} has shape {list(operand.shape)}, "
                "which does not go with the other operands"
            )
    if len({group for group, _ in groups}) > 1 or len({layer for _, layer in groups if layer >= 0}) > 1:
        raise ValueError(f"instruction {name} mixes KV groups or layers")
    for term, output in zip(rule.outputs, outputs, strict=True):
        target = plan.buffers[output.buffer]
        wanted = "uint8" if term.bytes else "float32"
        if instruction.op == "copy" and inputs[0] is not None:
            wanted = plan.buffers[inputs[0].buffer].dtype
        if (target.kind, target.dtype) != ("arena", wanted):
            raise ValueError(f"instruction {name} cannot write {wanted} values to {target.name}")
    shapes = [o.shape for o in inputs if o is not None], [o.shape for o in outputs]
    if not all(where(bound) for where in rule.where) or (
        rule.matches is not None and not rule.matches(*shapes, instruction.attrs)
    ):
        raise ValueError(f"instruction {name} ({instruction.op}) has operands whose sizes do not go together")
    if instruction.op == "embedding" and inputs[0] is not None:
        tokens = plan.buffers[inputs[0].buffer].name == "input_ids"
        values = config.model.vocab_size if tokens else config.build.max_seq_len
        if int(str(bound["V"])) < int(str(values)):
            raise ValueError(f"instruction {name} looks rows up that its table does not have")


def _check_memory(name: str, term: Term, operand: Operand, buffer: Buffer) -> None:
    """Whether the operand lies in the kind of memory that the term is about."""
    cache = term.name if term.name in ("k_cache", "v_cache") else None
    if term.step_input:
        fits = buffer.kind == "input" and buffer.name.partition(".")[0] in term.name.split("|")
    elif cache is not None:
        fits = buffer.kind == cache
    else:
        fits = buffer.kind in ("arena", "weight", "constant")
        if buffer.kind == "arena" and term.bytes:
            fits = buffer.dtype == "uint8"
    if not fits:
        raise ValueError(f"instruction {name}: {operand.name} cannot be its operand {term.name or 'result'}")


def _node_spec(instruction: Instruction, plan: Plan, config: EngineConfig) -> NodeSpec:
    specs: list[TensorSpec | None] = []
    for index in instruction.inputs:
        if index < 0:
            specs.append(None)
            continue
        operand = plan.operands[index]
        buffer = plan.buffers[operand.buffer]
        if buffer.kind in ("weight", "constant"):
            specs.append(TensorSpec.of_weight(buffer.quant, operand.shape))
        else:
            specs.append(TensorSpec(dtype=buffer.dtype, shape=operand.shape))
    activations = config.build.activations
    assert activations is not None
    return NodeSpec(op=instruction.op, inputs=tuple(specs), attrs=instruction.attrs, activations=activations)


def _check_tactic(
    instruction: Instruction, tactic: Tactic, spec: NodeSpec, plan: Plan, max_tokens: int
) -> None:
    name = instruction.name
    try:
        supported = tactic.supports(spec)
        workspace = tactic.workspace(spec, max_tokens)
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError):
        supported, workspace = False, 0
    if not supported:
        raise ValueError(f"tactic {tactic.name} does not take the operands of instruction {name}")
    if workspace > plan.workspace_bytes:
        raise ValueError(f"instruction {name} needs more workspace than there is")
    for i, index in enumerate(instruction.inputs):
        if index >= 0:
            buffer = plan.buffers[plan.operands[index].buffer]
            wanted = tactic.weight_layouts.get(i, "rows")
            if buffer.kind in ("weight", "constant") and buffer.layout != wanted:
                raise ValueError(
                    f"tactic {tactic.name} wants the layout {wanted} of {buffer.name}, not {buffer.layout}"
                )
