"""Two hundred steps: host bytes, file space, file handles, threads and Python objects do not grow."""

from __future__ import annotations

import gc

import pytest

from lowtide import simdevice
from lowtide.stores.disk import THREADS
from models.trained import BOUNDARY, LAYERS, Scene, assert_same, open_files, our_threads, train_step

POLICIES = [
    ("cpu", "recompute+offload(disk={}, tmpfs)"),
    ("sim", "recompute+offload(disk={}, tmpfs, verify)"),
    ("sim", f"recompute+offload(host={2 * BOUNDARY}, disk={{}}, tmpfs)"),
    ("sim", "recompute+offload"),
]


SLACK = {
    "objects": 100,
    "threads": THREADS,
    "peak host": LAYERS * BOUNDARY,
    "peak disk": LAYERS * BOUNDARY,
    "pinned": LAYERS * BOUNDARY,
}
"""How busy threads and buffers are is a matter of timing. What one step leaves behind, two hundred would multiply."""


def counts(scene):
    gc.collect()
    usage = scene.store.usage()
    return {
        "objects": len(gc.get_objects()),
        "files": open_files(),
        "threads": len(our_threads()),
        "held": scene.store.bytes_used,
        "peak host": usage.peak_host_bytes,
        "peak disk": usage.disk.peak_bytes if usage.disk else 0,
        "pinned": simdevice.stats().pinned_bytes,
        "on device": simdevice.stats().live_bytes,
    }


@pytest.mark.parametrize(("device", "policy"), POLICIES)
def test_nothing_grows(sim, tmp_path, device, policy):
    scene = Scene(device, policy.format(tmp_path))
    for _ in range(20):
        train_step(scene.model)
    before = counts(scene)
    for _ in range(200):
        train_step(scene.model)
    after = counts(scene)
    assert after["peak disk"] <= (LAYERS - 1) * BOUNDARY
    for name, slack in SLACK.items():
        assert after.pop(name) <= before.pop(name) + slack, name
    assert after == before
    assert after["held"] == 0
    assert_same(train_step(scene.model), scene.expected)
    scene.close()
