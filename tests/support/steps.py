"""The steps of training programs, by name. Each is a function of a `Run` (`support.programs`)."""

from __future__ import annotations

import contextlib
import copy
import io
import threading

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

import lowtide


class ExpectedError(Exception):
    """The error that some steps bring about, and catch."""


def _optimize(run, *, set_to_none=True):
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=set_to_none)


def _first_loss(run):
    if run.pending and len(run.pending[-1]) > 1:
        run.pending[-1].pop(0).backward(retain_graph=True)


def _gradient_only(run):
    if run.pending:
        wanted = [p for p in run.model.parameters() if p.requires_grad]
        run.see(torch.autograd.grad(sum(run.pending.pop()), wanted, allow_unused=True))


def _gradient_penalty(run):
    if run.pending:
        losses = run.pending.pop()
        wanted = [p for p in run.model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(sum(losses), wanted, create_graph=True, allow_unused=True)
        (sum(losses) + sum(grad.square().sum() for grad in grads if grad is not None)).backward()


def _in_a_thread(run):
    errors = []

    def work():
        try:
            run.backward()
        except BaseException as error:  # noqa: BLE001  (raised again by the step)
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _change_weight(run):
    module, name = run.weight()
    with torch.no_grad():
        getattr(module, name).mul_(1.1)


def _replace_data(run):
    module, name = run.weight()
    getattr(module, name).data = getattr(module, name).data * 1.1


def _replace_weight(run):
    module, name = run.weight()
    weight = getattr(module, name)
    setattr(module, name, nn.Parameter(weight.detach() * 1.1, requires_grad=weight.requires_grad))
    run.make_optimizer()


def _load(run, **settings):
    state = {
        name: value * 0.9 if value.is_floating_point() else value.clone()
        for name, value in run.model.state_dict().items()
    }
    run.model.load_state_dict(state, **settings)
    if settings:
        run.make_optimizer()


def _buffers(run):
    for module in run.model.regions[0].modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                yield module, name, buffer


def _change_buffers(run):
    for _, _, buffer in _buffers(run):
        buffer.mul_(1.1)


def _replace_buffers(run):
    for module, name, buffer in _buffers(run):
        setattr(module, name, buffer * 1.1)


def _change_attribute(run):
    for module in run.model.regions[0].modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
        if hasattr(module, "factor"):
            module.factor *= 1.1


def _held(run, kind):
    """The attributes of the first region's parts that hold values of a kind: where they are, and by which names."""
    for module in run.model.regions[0].modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, kind) and not name.startswith("_"):
                yield module, name, value


def _plain_tensors(run):
    return [found for found in _held(run, torch.Tensor) if found[2].grad_fn is None and not found[2].requires_grad]


def _change_tensors(run):
    for _, _, tensor in _plain_tensors(run):
        tensor.mul_(1.1)


def _replace_tensors(run):
    for module, name, tensor in _plain_tensors(run):
        setattr(module, name, tensor * 1.1)


def _change_containers(run):
    for _, name, items in _held(run, list):
        items.append({"seen": 0.5, "active": "other"}.get(name, items[-1] if items else 0.5))
    for _, _, entries in _held(run, dict):
        entries.update({key: value * 1.1 for key, value in entries.items() if isinstance(value, float)})


def _replace_containers(run):
    for module, name, items in _held(run, list):
        setattr(module, name, items[:-1] if name == "seen" else items[::-1] * 2)


def _masks(run):
    for module in run.model.regions[0].modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.dtype is torch.bool:
                yield module, name, buffer


def _change_masks(run):
    for _, name, mask in _masks(run):
        if name == "large":  # a small one is put back, where autograd refuses it
            mask.logical_not_()


def _replace_masks(run):
    for module, name, mask in _masks(run):
        setattr(module, name, ~mask)


def _activation(run):
    """A module without weights in the first region: its name, and what holds it."""
    for module in run.model.regions[0].modules():
        for name in ("act", "act_fn"):
            if name in dict(module.named_children()):
                return module, name
    return None


def _replace_part(run):
    if (found := _activation(run)) is not None:
        setattr(*found, nn.Tanh())


def _replace_forward(run):
    if (found := _activation(run)) is not None:
        getattr(*found).forward = torch.sigmoid


def _change_hidden(run):
    for _, name, parts in _held(run, list):
        if name == "parts":
            with torch.no_grad():
                parts[0].weight.mul_(1.1)


def _closure_hook(run):
    """A hook that is in force during one forward only, and refers to a number that changes afterwards."""
    factor = [1.2]
    with run.model.regions[0].mlp.register_forward_hook(lambda _module, _args, out: out * factor[0]):
        run.forward()
    factor[0] = 3.0


def _hook_of_all(run):
    """A hook of all modules, in force during one forward only."""
    hook = lambda module, _args, out: out * 1.2 if isinstance(module, nn.Linear) else None  # noqa: E731
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        run.forward()
    finally:
        handle.remove()


def _lifted_hook(run):
    """A hook that is in force during one forward only."""
    with run.model.regions[0].mlp.register_forward_hook(lambda _module, _args, out: out * 1.1):
        run.forward()


def _functional(run):
    """A forward with other weights; their gradients come at once."""
    others = {
        name: (weight.detach() * 1.2).requires_grad_(weight.requires_grad)
        for name, weight in run.model.named_parameters()
    }
    x = run.batch()
    losses = run.model.losses(functional_call(run.model, others, (x,)))
    run.see(losses)
    wanted = [weight for weight in others.values() if weight.requires_grad]
    run.see(torch.autograd.grad(sum(losses), wanted, allow_unused=True))


def _functional_step(run):
    """A step of MAML: a forward with weights that an inner step made, and one gradient through both."""
    names, weights = zip(*((n, w) for n, w in run.model.named_parameters() if w.requires_grad), strict=True)
    inner = sum(run.model.losses(run.model(run.batch())))
    grads = torch.autograd.grad(inner, weights, create_graph=True, allow_unused=True)
    fast = {n: w if g is None else w - 0.1 * g for n, w, g in zip(names, weights, grads, strict=True)}
    losses = run.model.losses(functional_call(run.model, fast, (run.batch(),)))
    run.see(losses)
    sum(losses).backward()


def _per_sample(run):
    """Gradients of each sample, by transforms of functions."""
    weights = {name: weight.detach() for name, weight in run.model.named_parameters()}
    gradient = torch.func.grad(lambda w, x: functional_call(run.model, w, (x[None],)).square().mean())
    run.see(torch.func.vmap(gradient, in_dims=(None, 0), randomness="different")(weights, run.batch()).values())


def _forward_mode(run):
    x = run.batch()
    run.see(torch.func.jvp(run.model, (x,), (torch.ones_like(x),)))


def _hidden_gradients(run):
    """A forward whose hidden states keep their gradients, and its backward."""
    kept = []

    def keep(_module, _args, out):
        kept.extend(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)

    with contextlib.ExitStack() as stack:
        for region in run.model.regions:
            stack.enter_context(region.register_forward_hook(keep))
        run.forward()
    for hidden in kept:
        hidden.retain_grad()
    run.backward()
    run.see([hidden.grad for hidden in kept])


def _optimizer_in_backward(run):
    """A step that each weight makes as soon as its gradient is there."""

    def update(weight):
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=0.01)
        weight.grad = None

    with contextlib.ExitStack() as stack:
        for weight in run.model.parameters():
            if weight.requires_grad:
                stack.callback(weight.register_post_accumulate_grad_hook(update).remove)
        run.forward()
        run.backward()


def _kept_on_host(run):
    with torch.autograd.graph.save_on_cpu():
        run.forward()


def _apply_another(run):
    if run.engine.policy is not None:
        run.applied = lowtide.apply(run.model, "recompute", regions=["regions.*"] if run.program.regions else None)


def _pickle(run):
    """The program goes on with what was saved and loaded."""
    call, run.model.call = run.model.call, None
    file = io.BytesIO()
    try:
        torch.save(run.model, file)
    finally:
        run.model.call = call
    file.seek(0)
    run.model = torch.load(file, weights_only=False)
    run.model.call = call
    run.make_optimizer()


def _evaluate(run):
    run.model.eval()
    with torch.no_grad():
        run.see([run.model(run.batch())])
    run.model.train()


def _without_gradients(run, mode=torch.no_grad):
    with mode():
        run.see([run.model(run.batch())])


def _raise(*_):
    raise ExpectedError


def _fail_forward(run, module):
    handle = module.register_forward_pre_hook(_raise)
    try:
        run.model(run.batch())
    except ExpectedError:
        run.see([torch.ones(1)])
    finally:
        handle.remove()


def _fail_backward(run):
    """An error in the middle of a backward. What it left in the gradients is thrown away."""
    module, name = run.weight()
    if not getattr(module, name).requires_grad:
        return
    run.forward()
    handle = getattr(module, name).register_hook(_raise)
    try:
        run.backward()
    except ExpectedError:
        run.see([torch.ones(1)])
    finally:
        handle.remove()
    run.optimizer.zero_grad()


def _change_keywords(run):
    """Change in place what the last forward got by keyword."""
    for tensor in tree_leaves(run.model.kwargs):
        if isinstance(tensor, torch.Tensor):
            tensor.add_(1)


def _freeze(run, *, requires_grad):
    run.model.regions[-1].requires_grad_(requires_grad)


def _change_input(run):
    if run.inputs:
        with torch.no_grad():
            run.inputs[-1].add_(1)


def _copy(run):
    """The program goes on with a copy, which runs plainly until a policy is applied to it."""
    call, run.model.call = run.model.call, None
    twin = copy.deepcopy(run.model)
    run.model.call = twin.call = call
    run.model = twin
    run.make_optimizer()


def _cached(run):
    with parametrize.cached():
        run.forward()
        run.backward()


def _autocast(run):
    return torch.autocast(run.engine.device, torch.bfloat16)


def _under_autocast(run):
    with _autocast(run):
        run.forward()


def _remove(run):
    if run.applied is not None:
        run.applied.remove()


STEPS = {
    "forward": lambda run: run.forward(),
    "longer forward": lambda run: run.forward(more=16),
    "autocast forward": _under_autocast,
    "cached": _cached,
    "functional": _functional,
    "functional step": _functional_step,
    "forward without gradients": _without_gradients,
    "per-sample gradients": _per_sample,
    "forward-mode gradient": _forward_mode,
    "hidden gradients": _hidden_gradients,
    "optimizer in backward": _optimizer_in_backward,
    "forward kept on the host": _kept_on_host,
    "inference mode": lambda run: _without_gradients(run, torch.inference_mode),
    "part in evaluation mode": lambda run: run.model.regions[0].eval(),
    "evaluation": _evaluate,
    "evaluation mode": lambda run: run.model.eval(),
    "training mode": lambda run: run.model.train(),
    "forward with a hook": _lifted_hook,
    "backward": lambda run: run.backward(),
    "backward of the oldest": lambda run: run.backward(0),
    "backward of one loss": _first_loss,
    "backward in a thread": _in_a_thread,
    "backward under no_grad": lambda run: run.backward(context=torch.no_grad),
    "backward under autocast": lambda run: run.backward(context=lambda: _autocast(run)),
    "gradient only": _gradient_only,
    "gradient penalty": _gradient_penalty,
    "step": _optimize,
    "step to zeros": lambda run: _optimize(run, set_to_none=False),
    "weight in place": _change_weight,
    "weight .data replaced": _replace_data,
    "weight replaced": _replace_weight,
    "state loaded": _load,
    "state assigned": lambda run: _load(run, assign=True),
    "buffers in place": _change_buffers,
    "buffers replaced": _replace_buffers,
    "attribute changed": _change_attribute,
    "attribute tensors in place": _change_tensors,
    "attribute tensors replaced": _replace_tensors,
    "containers changed": _change_containers,
    "containers replaced": _replace_containers,
    "masks in place": _change_masks,
    "masks replaced": _replace_masks,
    "part replaced": _replace_part,
    "part's forward replaced": _replace_forward,
    "hidden weight in place": _change_hidden,
    "forward with a closure as a hook": _closure_hook,
    "forward with a hook of all modules": _hook_of_all,
    "input in place": _change_input,
    "keywords in place": _change_keywords,
    "freeze": lambda run: _freeze(run, requires_grad=False),
    "unfreeze": lambda run: _freeze(run, requires_grad=True),
    "error in a region": lambda run: _fail_forward(run, run.model.regions[-1]),
    "error in an MLP": lambda run: _fail_forward(run, run.model.regions[-1].mlp),
    "error in backward": _fail_backward,
    "copy": _copy,
    "policy removed": _remove,
    "policy applied": lambda run: run.apply(),
    "another policy": _apply_another,
    "saved and loaded": _pickle,
    "random numbers": lambda _: torch.rand(3),
}

CRASHING = ("per-sample gradients", "forward-mode gradient")
"""Steps that end torch itself with a segmentation fault for some models without any policy; never drawn at random."""
