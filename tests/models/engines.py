"""A small checkpoint engine that is right, and one broken version of it for every check."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

WIDTH = 16


class Block(nn.Module):
    def __init__(self, *, batch_norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH) if batch_norm else nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, *, scale=None):
        y = self.down(self.dropout(torch.tanh(self.up(self.norm(x)))))
        return x + (y if scale is None else y * scale)


class Net(nn.Module):
    """Six blocks. The hidden state goes in by keyword, or another tensor as large as it does."""

    def __init__(self, *, batch_norm: bool = False, by_keyword: bool = False, scaled: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(Block(batch_norm=batch_norm) for _ in range(6))
        self.head = nn.Linear(WIDTH, 32)
        self.by_keyword, self.scaled = by_keyword, scaled

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            extra = {"scale": x * 0.5} if self.scaled else {}
            x = layer(x=x) if self.by_keyword else layer(x, **extra)
        return self.head(x)


class Pairs(nn.Module):
    """LongCat's layers: each holds stacks of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Block() for _ in range(2))
        self.mlps = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = mlp(attention(x))
        return x


class Bare(nn.Module):
    """Nothing with weights comes before or after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Attention(nn.Module):
    """A block of fused attention, which torch tags as if it drew random numbers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x):
        y = self.project(x)[None, None]
        return x + nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=self.dropout)[0, 0]


def loss(logits):
    return logits.float().log_softmax(-1)[:, 0].neg().mean()


def net(**options):
    torch.manual_seed(0)
    return Net(**options), (torch.arange(24) % 32,)


class Engine:
    """Checkpoints every block by an object in the place of its forward. The right one."""

    def __call__(self, model):
        for index, block in enumerate(self.blocks(model)):
            if self.wraps(block):
                block.forward = Forward(block, block.forward, self, index)
        return Handle(self, model)

    def blocks(self, model):
        return list(model.layers)

    def wraps(self, block) -> bool:
        return not isinstance(block.__dict__.get("forward"), Forward)

    def run(self, function, index, args, kwargs):
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    def remove(self, model):
        for block in model.layers:
            block.__dict__.pop("forward", None)


class Forward:
    def __init__(self, module, below, engine, index) -> None:
        self.module, self.below, self.engine, self.index = module, below, engine, index

    def __call__(self, *args, **kwargs):
        return self.engine.run(self.below, self.index, args, kwargs)


class Handle:
    def __init__(self, engine, model) -> None:
        self.engine, self.model = engine, model

    def remove(self):
        self.engine.remove(self.model)


class SkipsALayer(Engine):
    def blocks(self, model):
        return list(model.layers)[1:]


class KeepsAttention(Engine):
    """Torch's selective checkpointing: attention is not run again."""

    def keeps(self, index) -> bool:
        return True

    def run(self, function, index, args, kwargs):
        operators = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default] if self.keeps(index) else []
        contexts = functools.partial(create_selective_checkpoint_contexts, operators)
        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class KeepsSomeAttention(KeepsAttention):
    def keeps(self, index) -> bool:
        return index > 0


class DoesNothing(Engine):
    def blocks(self, model):
        return []


class DropsAGradient(Engine):
    change = staticmethod(torch.zeros_like)

    def __call__(self, model):
        bias = model.head.bias
        if bias.requires_grad and not bias._backward_hooks:
            bias.register_hook(self.change)
        return super().__call__(model)

    def remove(self, model):
        super().remove(model)
        model.head.bias._backward_hooks.clear()


class ChangesAGradient(DropsAGradient):
    change = staticmethod(torch.exp)


class ForgetsTheRandomState(Engine):
    def run(self, function, index, args, kwargs):
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class ChangesTheOutput(Engine):
    def run(self, function, index, args, kwargs):
        return super().run(function, index, args, kwargs) * 1.01


class TwoBackwards(torch.autograd.Function):
    """One recomputation, and a backward for each half of the gradient."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function, ctx.state = function, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        leaf = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng():
            torch.set_rng_state(ctx.state)
            output = ctx.function(leaf)
        output.backward(grad / 2, retain_graph=True)
        output.backward(grad / 2)
        return None, leaf.grad


class AccumulatesTwice(Engine):
    def run(self, function, index, args, kwargs):
        return TwoBackwards.apply(function, *args)


class KeepsEverything(Engine):
    """Runs blocks again, and holds what they made in forward as well."""

    def run(self, function, index, args, kwargs):
        kept = []

        def pack(tensor):
            kept.append(tensor)
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with torch.random.fork_rng(), hooks:
            function(*args, **kwargs)  # its graph dies, what it saved does not
        output = checkpoint(function, *args, use_reentrant=False, **kwargs)
        output.grad_fn.metadata["kept"] = kept
        return output


class CannotBeUndone(Engine):
    def remove(self, model):
        pass


class HooksAgainAndAgain(Engine):
    def __call__(self, model):
        model.register_forward_hook(_look)
        return super().__call__(model)

    def remove(self, model):
        super().remove(model)
        model._forward_hooks.clear()


def _look(module, args, output):
    pass


class CannotBePickled(HooksAgainAndAgain):
    def __call__(self, model):
        if not model._forward_hooks:
            model.register_forward_hook(lambda *_: None)
        return Engine.__call__(self, model)


class Torn:
    """A hook that is written, and cannot be read again."""

    def __call__(self, module, args, output):
        pass

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return int, ("torn",)


class CannotBeUnpickled(CannotBePickled):
    def __call__(self, model):
        if not model._forward_hooks:
            model.register_forward_hook(Torn())
        return Engine.__call__(self, model)


class RefusesWithoutAWord(Engine):
    """Compares versions itself."""

    def run(self, function, index, args, kwargs):
        def unpack(packed):
            tensor, version = packed
            if tensor._version != version:
                raise RuntimeError
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor.detach(), tensor._version), unpack):
            return super().run(function, index, args, kwargs)


class LosesTheInPlaceCheck(Engine):
    def run(self, function, index, args, kwargs):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
            return super().run(function, index, args, kwargs)


class Away:
    """A tensor that left: to bytes that torch does not own."""

    def __init__(self, tensor) -> None:
        self.array = tensor.detach().numpy().copy()


class Offloads(Engine):
    """Inputs leave memory, keywords too; the right one."""

    def run(self, function, index, args, kwargs):
        names, count = list(kwargs), len(args)

        def flat(*tensors):
            return function(*tensors[:count], **dict(zip(names, tensors[count:], strict=True)))

        with torch.autograd.graph.saved_tensors_hooks(Away, self.restore):
            return checkpoint(flat, *args, *kwargs.values(), use_reentrant=False)

    def restore(self, away):
        return torch.from_numpy(away.array).clone()


class OffloadsPositionalOnly(Offloads):
    def run(self, function, index, args, kwargs):
        with torch.autograd.graph.saved_tensors_hooks(Away, self.restore):
            return checkpoint(function, *args, use_reentrant=False, **kwargs)


class HoldsWhatItRestored(Offloads):
    def __init__(self) -> None:
        self.cache = []

    def restore(self, away):
        self.cache.append(super().restore(away))
        return self.cache[-1]


class Reentrant(Engine):
    def run(self, function, index, args, kwargs):
        return checkpoint(function, *args, use_reentrant=True, **kwargs)
