"""Models as torchtitan, litgpt, torchtune and others train them, for plans of runs whose memory they published.

Each factory is written from what the framework's code does that memory can tell: which type a norm computes in, whether
keys and values are repeated, what the loss is made of. It returns `(model, batch)`, and the model returns
`(loss, output)`, so that a plan can keep the output through backward as the framework's loop does.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten


class Norm(nn.Module):
    """A root-mean-square norm that computes in float32: torchtitan's and torchtune's before they had fused ones."""

    def __init__(self, dim: int, *, scale_in_float: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.scale_in_float = scale_in_float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * self.weight.float()).type_as(x) if self.scale_in_float else wide.type_as(x) * self.weight


def rotate_complex(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate pairs as complex numbers, as torchtitan does."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(3).type_as(x)


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs that lie side by side in float32, as torchtune does."""
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    real, imaginary = pairs[..., 0], pairs[..., 1]
    return torch.stack([real * cos - imaginary * sin, imaginary * cos + real * sin], -1).flatten(3).type_as(x)


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first half against the second, as litgpt does."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (turned * sin)).to(x.dtype)


# --- What a compiler fuses ------------------------------------------------------------------------------------------


class FusedNorm(torch.autograd.Function):
    """A norm as a compiler fuses it: it keeps its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, _grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class FusedProduct(torch.autograd.Function):
    """An activation times a gate as a compiler fuses it: it keeps its two inputs."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, _grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return torch.empty_like(gate), torch.empty_like(up)


class FusedRotation(torch.autograd.Function):
    """A rotation as a compiler fuses it: it keeps nothing but the tables, which all layers share."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(grad)


class FusedLoss(torch.autograd.Function):
    """A cross entropy as a compiler fuses it: it keeps the logits as they are, and one number per row."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        rows = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
        ctx.save_for_backward(logits, rows)
        return rows.sum()

    @staticmethod
    def backward(ctx: Any, _grad: torch.Tensor) -> torch.Tensor:
        logits, _ = ctx.saved_tensors
        return torch.empty_like(logits)


class CompiledNorm(nn.Module):
    """A norm inside a compiled block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FusedNorm.apply(x, self.weight)


# --- torchtitan -----------------------------------------------------------------------------------------------------


class TitanBlock(nn.Module):
    """A block of torchtitan's Llama and Qwen3, with torchtitan's own activation checkpointing if it is selective."""

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        kv: int,
        ffn: int,
        width: int,
        fused_norm: bool,
        qk_norm: bool,
        compiled: bool,
    ) -> None:
        super().__init__()
        norm = CompiledNorm if compiled else functools.partial(nn.RMSNorm, eps=1e-5) if fused_norm else Norm
        self.compiled = compiled
        self.heads, self.kv, self.width = heads, kv, width
        self.attention_norm, self.ffn_norm = norm(dim), norm(dim)
        self.wq = nn.Linear(dim, heads * width, bias=False)
        self.wk = nn.Linear(dim, kv * width, bias=False)
        self.wv = nn.Linear(dim, kv * width, bias=False)
        self.wo = nn.Linear(heads * width, dim, bias=False)
        self.w1 = nn.Linear(dim, ffn, bias=False)
        self.w3 = nn.Linear(dim, ffn, bias=False)
        self.w2 = nn.Linear(ffn, dim, bias=False)
        self.q_norm, self.k_norm = (norm(width), norm(width)) if qk_norm else (None, None)
        self.selective = False

    def forward(self, x: torch.Tensor, angles: Any) -> torch.Tensor:
        if not self.selective:
            return self.run(x, angles)
        contexts = functools.partial(create_selective_checkpoint_contexts, every_second_product())
        return checkpoint(self.run, x, angles, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    def run(self, x: torch.Tensor, angles: Any) -> torch.Tensor:
        h = x + self.attend(self.attention_norm(x), angles)
        y = self.ffn_norm(h)
        gate, up = self.w1(y), self.w3(y)
        return h + self.w2(FusedProduct.apply(gate, up) if self.compiled else F.silu(gate) * up)

    def attend(self, x: torch.Tensor, angles: Any) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q, k, v = (t.view(batch, length, -1, self.width) for t in (q, k, v))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotate(q, angles), self.rotate(k, angles)
        k, v = self.repeat(k), self.repeat(v)
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))

    def rotate(self, x: torch.Tensor, angles: Any) -> torch.Tensor:
        if self.compiled:
            return FusedRotation.apply(x)
        if not isinstance(angles, tuple):
            return rotate_complex(x, angles)
        cos, sin = angles  # Qwen3 rotates halves in the type of the tables, which are float32
        return rotate_halves(x, cos, sin)

    def repeat(self, x: torch.Tensor) -> torch.Tensor:
        times = self.heads // self.kv
        if times == 1:
            return x
        batch, length, _, width = x.shape
        return x[:, :, :, None, :].expand(batch, length, self.kv, times, width).reshape(batch, length, -1, width)


def every_second_product() -> Any:
    """Return torchtitan's selective policy: attention and every second matrix product are kept, counted per block."""
    counts = {False: 0, True: 0}

    def choose(context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operator is aten.mm.default:
            counts[context.is_recompute] += 1
            kept = counts[context.is_recompute] % 2 == 1
        else:
            kept = "scaled_dot_product" in str(operator)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return choose


class Titan(nn.Module):
    """torchtitan's decoder with its loss: logits from a 16-bit product, then a copy of them in float32."""

    def __init__(self, *, dim: int, layers: int, vocab: int, compiled_loss: bool, **block: Any) -> None:
        super().__init__()
        self.compiled_loss = compiled_loss
        self.halves = block["qk_norm"]
        self.width = block["width"]
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(TitanBlock(dim=dim, **block) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5) if block["fused_norm"] else Norm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.tok_embeddings(ids)
        angles = self.angles(ids.shape[1], h.device)
        for layer in self.layers:
            h = layer(h, angles)
        logits = self.output(self.norm(h))
        if self.compiled_loss:
            return FusedLoss.apply(logits.flatten(0, 1)) / labels.numel(), logits
        logits = logits.float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1)), logits

    def angles(self, length: int, device: torch.device) -> Any:
        if not self.halves:
            return torch.empty(1, length, 1, self.width // 2, dtype=torch.complex64, device=device)
        return tuple(torch.empty(1, length, 1, self.width, dtype=torch.float32, device=device) for _ in range(2))


def torchtitan(
    dim: int = 4096,
    layers: int = 32,
    heads: int = 32,
    kv: int = 8,
    ffn: int = 14336,
    vocab: int = 128256,
    width: int = 128,
    batch: int = 1,
    seq: int = 8192,
    selective: bool = False,
    fused_norm: bool = False,
    qk_norm: bool = False,
    compiled: bool = False,
    compiled_loss: bool = False,
) -> tuple[nn.Module, Any]:
    """torchtitan's Llama 3 8B by default; with `qk_norm` its Qwen3."""
    block = {"heads": heads, "kv": kv, "ffn": ffn, "width": width, "fused_norm": fused_norm, "qk_norm": qk_norm}
    model = Titan(dim=dim, layers=layers, vocab=vocab, compiled_loss=compiled_loss, **block, compiled=compiled)
    for layer in model.layers:
        layer.selective = selective
    return model, tokens(batch, seq, vocab)


# --- litgpt ---------------------------------------------------------------------------------------------------------


class LitNorm(nn.Module):
    def __init__(self, dim: int, *, fused: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.fused = fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return FusedNorm.apply(x, self.weight)
        wide = x.float()
        wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * wide).to(x.dtype)


class LitQKV(nn.Module):
    """litgpt's fused projection with low-rank adapters on queries and values."""

    def __init__(self, dim: int, groups: int, per_group: int, width: int, rank: int, *, bias: bool) -> None:
        super().__init__()
        out = groups * (per_group + 2) * width
        self.linear = nn.Linear(dim, out, bias=bias)
        self.rank = rank
        if not rank:
            return
        self.linear.requires_grad_(False)
        queries, values = groups * per_group * width, groups * width
        self.sizes = (queries, values)
        self.lora_A = nn.Parameter(torch.empty(2 * rank, dim))
        self.lora_B = nn.Parameter(torch.empty(queries + values, rank))
        self.register_buffer("places", torch.arange(queries + values, device="cpu"), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pretrained = self.linear(x)
        if not self.rank:
            return pretrained
        low = F.linear(F.dropout(x, 0.05, self.training), self.lora_A).transpose(-2, -1)
        parts = [
            F.conv1d(half, weight.unsqueeze(-1))
            for half, weight in zip(low.chunk(2, dim=1), self.lora_B.split(self.sizes), strict=True)
        ]
        high = torch.cat(parts, dim=1).transpose(-2, -1)
        padded = x.new_zeros(*x.shape[:-1], self.linear.out_features).flatten(0, -2)
        padded = padded.index_copy(1, self.places.to(x.device), high.reshape(-1, sum(self.sizes)))
        return pretrained + padded.view_as(pretrained) * 0.5


class LitBlock(nn.Module):
    """litgpt's block: Llama's, or GPT-NeoX's with a parallel residual and biases."""

    def __init__(
        self,
        *,
        dim: int,
        heads: int,
        kv: int,
        ffn: int,
        neox: bool,
        shared: bool,
        turned: float,
        rank: int,
        fused: bool,
    ) -> None:
        super().__init__()
        self.heads, self.kv, self.width = heads, kv, dim // heads
        self.neox, self.fused, self.turned = neox, fused, int(turned * (dim // heads))
        norm = nn.LayerNorm if neox else functools.partial(LitNorm, fused=fused)
        self.norm_1 = norm(dim)
        self.attn = LitQKV(dim, kv, heads // kv, self.width, rank, bias=neox)
        self.proj = nn.Linear(dim, dim, bias=neox)
        self.norm_2 = None if shared else norm(dim)
        if neox:
            self.fc, self.out = nn.Linear(dim, ffn), nn.Linear(ffn, dim)
        else:
            self.fc_1, self.fc_2 = nn.Linear(dim, ffn, bias=False), nn.Linear(dim, ffn, bias=False)
            self.out = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first = self.norm_1(x)
        attended = self.attend(first, cos, sin)
        if self.neox:
            return self.mlp(first if self.norm_2 is None else self.norm_2(x)) + attended + x
        x = attended + x
        return self.mlp(self.norm_2(x)) + x

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        if self.neox:
            return self.out(F.gelu(self.fc(x)))
        gate, up = self.fc_1(x), self.fc_2(x)
        return self.out(FusedProduct.apply(gate, up) if self.fused else F.silu(gate) * up)

    def attend(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        per_group = self.heads // self.kv
        qkv = self.attn(x).view(batch, length, self.kv, per_group + 2, self.width).permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((per_group, 1, 1), dim=2)
        if per_group > 1:
            k, v = (t.expand(batch, self.kv, per_group, length, self.width) for t in (k, v))
        q, k, v = (t.reshape(batch, -1, length, self.width) for t in (q, k, v))
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.transpose(1, 2).reshape(batch, length, dim))

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return FusedRotation.apply(x)
        roped = rotate_halves(x[..., : self.turned], cos, sin)
        return torch.cat((roped, x[..., self.turned :]), dim=-1)


class Lit(nn.Module):
    """litgpt's decoder, with the loss on whole 16-bit logits or, for adapters, on float32 chunks of 128 tokens."""

    def __init__(self, *, dim: int, layers: int, vocab: int, chunk: int, head_bias: bool, **block: Any) -> None:
        super().__init__()
        self.chunk, self.turned = chunk, int(block["turned"] * dim // block["heads"])
        self.wte = nn.Embedding(vocab, dim)
        self.h = nn.ModuleList(LitBlock(dim=dim, **block) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim) if block["neox"] else LitNorm(dim, fused=block["fused"])
        self.lm_head = nn.Linear(dim, vocab, bias=head_bias)
        if block["rank"]:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("lora_" in name)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, Any]:
        x = self.wte(ids)
        cos, sin = (torch.empty(ids.shape[1], self.turned, dtype=x.dtype, device=x.device) for _ in range(2))
        for block in self.h:
            x = block(x, cos, sin)
        x = self.ln_f(x)
        if not self.chunk:
            logits = self.lm_head(x)
            return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)), logits
        narrow = [self.lm_head(part) for part in x.split(self.chunk, dim=1)]
        chunks = [part.float() for part in narrow]  # Fabric returns float32: `HalfPrecision.convert_output`
        del narrow, x
        chunks[-1] = chunks[-1][:, :-1]
        losses = [
            F.cross_entropy(logits.reshape(-1, logits.shape[-1]), part.reshape(-1), reduction="none")
            for logits, part in zip(chunks, labels[:, 1:].split(self.chunk, dim=1), strict=True)
        ]
        return torch.cat(losses).mean(), chunks


def litgpt(
    dim: int = 4096,
    layers: int = 32,
    heads: int = 32,
    kv: int = 32,
    ffn: int = 11008,
    vocab: int = 32000,
    batch: int = 1,
    seq: int = 4096,
    rank: int = 0,
    neox: bool = False,
    shared: bool = False,
    turned: float = 1.0,
    fused: bool = False,
    head_bias: bool = False,
) -> tuple[nn.Module, Any]:
    """litgpt's Llama 2 7B by default; `fused` keeps what kernels that a compiler fused keep."""
    block = {"heads": heads, "kv": kv, "ffn": ffn, "neox": neox, "shared": shared, "turned": turned}
    chunk = 128 if rank else 0
    model = Lit(dim=dim, layers=layers, vocab=vocab, chunk=chunk, head_bias=head_bias, rank=rank, fused=fused, **block)
    return model, tokens(batch, seq, vocab)


# --- torchtune ------------------------------------------------------------------------------------------------------


class TuneBlock(nn.Module):
    """torchtune's block: keys and values repeated by `expand`, rotation and norms in float32."""

    def __init__(self, *, dim: int, heads: int, kv: int, ffn: int, compiled: bool) -> None:
        super().__init__()
        self.heads, self.kv, self.width, self.compiled = heads, kv, dim // heads, compiled
        norm = CompiledNorm if compiled else Norm
        self.sa_norm, self.mlp_norm = norm(dim), norm(dim)
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, kv * self.width, bias=False)
        self.v_proj = nn.Linear(dim, kv * self.width, bias=False)
        self.output_proj = nn.Linear(dim, dim, bias=False)
        self.w1 = nn.Linear(dim, ffn, bias=False)
        self.w3 = nn.Linear(dim, ffn, bias=False)
        self.w2 = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = self.attend(self.sa_norm(x), cos, sin) + x
        y = self.mlp_norm(h)
        gate, up = self.w1(y), self.w3(y)
        return h + self.w2(FusedProduct.apply(gate, up) if self.compiled else F.silu(gate) * up)

    def attend(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        times = self.heads // self.kv
        q = self.q_proj(x).view(batch, length, self.heads, self.width)
        k = self.k_proj(x).view(batch, length, self.kv, self.width)
        if self.compiled:
            q, k = FusedRotation.apply(q), FusedRotation.apply(k)
        else:
            q, k = rotate_pairs(q, cos, sin), rotate_pairs(k, cos, sin)
        v = self.v_proj(x).view(batch, length, self.kv, self.width)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if times > 1:
            shape = (batch, self.kv, times, length, self.width)
            k, v = (t.unsqueeze(2).expand(shape).flatten(1, 2) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output_proj(out.transpose(1, 2).contiguous().view(batch, length, -1))


class Tune(nn.Module):
    def __init__(self, *, dim: int, layers: int, vocab: int, chunks: int, **block: int) -> None:
        super().__init__()
        self.chunks, self.width, self.compiled = chunks, dim // block["heads"], block["compiled"]
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(TuneBlock(dim=dim, **block) for _ in range(layers))
        self.norm = Norm(dim)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, Any]:
        h = self.tok_embeddings(ids)
        shape = (1, ids.shape[1], 1, self.width // 2)
        cos, sin = (torch.empty(shape, dtype=torch.float32, device=h.device) for _ in range(2))
        for layer in self.layers:
            h = layer(h, cos, sin)
        h = self.norm(h)
        weight = self.tok_embeddings.weight
        if not self.chunks:
            logits = F.linear(h, weight).float()  # by the model, which is compiled layer by layer
            if self.compiled:
                return FusedLoss.apply(logits.flatten(0, 1)) / labels.numel(), logits
            return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)), logits
        parts = [F.linear(part, weight) for part in h.chunk(self.chunks, dim=1)]
        losses = [FusedLoss.apply(logits.flatten(0, 1)) for logits in parts]
        return torch.stack(losses).sum() / labels.numel(), parts


def torchtune(
    dim: int = 3072,
    layers: int = 28,
    heads: int = 24,
    kv: int = 8,
    ffn: int = 8192,
    vocab: int = 128256,
    batch: int = 2,
    seq: int = 4096,
    chunks: int = 0,
    compiled: bool = False,
) -> tuple[nn.Module, Any]:
    """torchtune's Llama 3.2 3B by default, with tied embeddings; `chunks` make its loss a compiled one."""
    block = {"heads": heads, "kv": kv, "ffn": ffn, "compiled": compiled}
    return Tune(dim=dim, layers=layers, vocab=vocab, chunks=chunks, **block), tokens(batch, seq, vocab)


# --- DeepSpeed's and Lightning's examples ---------------------------------------------------------------------------


class SimpleBlock(nn.Module):
    """A block of DeepSpeed's example; under 16-bit autocast, norms and softmax return float32, products 16 bits."""

    def __init__(self, dim: int, heads: int, ffn: int, *, autocast: bool) -> None:
        super().__init__()
        self.heads = heads
        self.wide = torch.float32 if autocast else torch.bfloat16
        self.in_proj, self.out_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, ffn), nn.Linear(ffn, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.normed(self.norm1, x + self.attend(x))
        return self.normed(self.norm2, x + self.fc2(F.gelu(self.fc1(x.bfloat16()))))

    def normed(self, norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.to(self.wide), norm.normalized_shape, norm.weight.to(self.wide), norm.bias.to(self.wide))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        shape = (length, batch * self.heads, dim // self.heads)
        narrow = x.bfloat16().transpose(0, 1)
        projected = self.in_proj(narrow).unflatten(-1, (3, dim)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
        q, k, v = (part.view(shape).transpose(0, 1) for part in projected)
        weights = F.softmax(torch.bmm(q * (1 / shape[-1] ** 0.5), k.transpose(-2, -1)).to(self.wide), dim=-1)
        out = torch.bmm(weights.bfloat16(), v).transpose(0, 1).contiguous().view(length * batch, dim)
        return self.out_proj(out).view(length, batch, dim).transpose(0, 1)


class Simple(nn.Module):
    def __init__(self, dim: int, layers: int, heads: int, ffn: int, vocab: int, seq: int, autocast: bool) -> None:
        super().__init__()
        self.wide = torch.float32 if autocast else torch.bfloat16
        self.embedding, self.positions = nn.Embedding(vocab, dim), nn.Embedding(seq, dim)
        self.layers = nn.ModuleList(SimpleBlock(dim, heads, ffn, autocast=autocast) for _ in range(layers))
        self.output = nn.Linear(dim, vocab)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, Any]:
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.output(x.bfloat16())
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).to(self.wide), labels.view(-1)), logits


def deepspeed_example(
    dim: int = 1024,
    layers: int = 12,
    heads: int = 16,
    ffn: int = 4096,
    vocab: int = 50000,
    batch: int = 4,
    seq: int = 512,
    autocast: bool = True,
) -> tuple[nn.Module, Any]:
    """The transformer of DeepSpeed's example with 16-bit master weights."""
    return Simple(dim, layers, heads, ffn, vocab, seq, autocast), tokens(batch, seq, vocab)


class Translator(nn.Module):
    def __init__(self, vocab: int, dim: int, heads: int, ffn: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.transformer = nn.Transformer(dim, heads, layers, layers, ffn, dropout=0.2, batch_first=True)
        self.decoder = nn.Linear(dim, vocab)

    def forward(self, inputs: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, Any]:
        source, wanted = self.embedding(inputs) * 32, self.embedding(target) * 32
        length = target.shape[1]
        mask = torch.triu(torch.full((length, length), float("-inf"), device=wanted.device), diagonal=1)
        out = self.decoder(self.transformer(F.dropout(source, 0.2), F.dropout(wanted, 0.2), tgt_mask=mask))
        out = F.log_softmax(out, dim=-1).view(-1, out.shape[-1])
        return F.nll_loss(out, target.view(-1)), out


def lightning_example(batch: int = 1, seq: int = 35) -> tuple[nn.Module, Any]:
    """Lightning's translator with 32 layers on each side."""
    made = tokens(batch, seq, 33278)
    return Translator(33278, 1024, 64, 4096, 32), {"inputs": made["ids"], "target": made["labels"]}


def tokens(batch: int, seq: int, vocab: int) -> dict[str, torch.Tensor]:
    """Return token numbers and labels, which have values: they are not meta tensors."""
    ids = torch.arange(batch * seq, device="cpu").remainder(vocab).reshape(batch, seq)
    return {"ids": ids, "labels": ids.clone()}


# --- transformers ---------------------------------------------------------------------------------------------------


def qwen2() -> nn.Module:
    """Qwen2.5 1.5B, whose batch the plan makes."""
    import transformers

    config = transformers.Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return transformers.Qwen2ForCausalLM(config)


def bert_large(batch: int = 4, seq: int = 512) -> tuple[nn.Module, Any]:
    """BERT large as a classifier of sequences, with attention written out."""
    import transformers

    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    config._attn_implementation = "eager"
    model = transformers.BertForSequenceClassification(config)
    made = tokens(batch, seq, config.vocab_size)
    return model, {"input_ids": made["ids"], "labels": torch.zeros(batch, dtype=torch.long, device="cpu")}
