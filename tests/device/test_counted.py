"""The counting device itself: known counts for known snippets, and transformers as the yardstick."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from device.counted import DEVICE, Counted, Log, counting
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache

from kvweave.run.kernel import added


def there(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape).to(DEVICE)


SNIPPETS: dict[str, tuple[Callable[[Tensor, Tensor], Any], dict[str, int]]] = {
    # name -> (what is done to x [3, 4] and index [2] on the device, what that costs)
    "add": (lambda x, i: x + 1, {"launch": 1}),
    "in place": (lambda x, i: x.mul_(2).add_(1), {"launch": 2}),
    "views": (lambda x, i: x.t()[1:].unsqueeze(0).expand(5, -1, -1).detach(), {}),
    "a reshape that copies": (lambda x, i: x.t().reshape(-1), {"launch": 1}),
    "allocating": (lambda x, i: (torch.empty_like(x), x.new_empty(5)), {}),
    "zeros": (lambda x, i: torch.zeros(3, device=DEVICE), {"launch": 1}),
    "nothing to do": (lambda x, i: x[:0] + 1, {}),
    "cast": (lambda x, i: x.to(torch.float64), {"launch": 1}),
    "cast to itself": (lambda x, i: x.to(x.device, torch.float32), {}),
    "matmul": (lambda x, i: x @ x.t(), {"launch": 1}),
    "linear": (lambda x, i: torch.nn.functional.linear(x[None], x), {"launch": 1}),
    "gather": (lambda x, i: x[i], {"launch": 1}),
    "scatter": (lambda x, i: x.index_copy_(0, i, x[1:] + 1), {"launch": 2}),
    "item": (lambda x, i: x[0, 0].item(), {"sync": 1}),
    "bool": (lambda x, i: bool(x[0, 0] > 1), {"launch": 1, "sync": 1}),
    "if": (lambda x, i: 1 if (x > 1).any() else 2, {"launch": 2, "sync": 1}),
    "float": (lambda x, i: float(x.sum()), {"launch": 1, "sync": 1}),
    "tolist": (lambda x, i: x.tolist(), {"sync": 1, "download": 1}),
    "cpu": (lambda x, i: x.cpu(), {"sync": 1, "download": 1}),
    "cpu later": (lambda x, i: x.to("cpu", non_blocking=True), {"download": 1}),
    "into a host tensor": (lambda x, i: torch.empty(3, 4).copy_(x), {"sync": 1, "download": 1}),
    "nonzero": (lambda x, i: x.nonzero(), {"launch": 1, "sync": 1}),
    "by a mask": (lambda x, i: x[x > 3], {"launch": 2, "sync": 1}),
    "unique": (lambda x, i: x.unique(), {"launch": 1, "sync": 1}),
    "equal": (lambda x, i: torch.equal(x, x.clone()), {"launch": 2, "sync": 1}),
    "by a host index": (lambda x, i: x[torch.tensor([0, 2])], {"launch": 1, "unpinned": 1}),
    "up": (lambda x, i: torch.ones(3).to(DEVICE), {"unpinned": 1}),
    "up from pinned memory": (
        lambda x, i: torch.ones(3).pin_memory().to(DEVICE, non_blocking=True),
        {"upload": 1},
    ),
    "up from a view of pinned memory": (
        lambda x, i: x[0].copy_(torch.ones(9).pin_memory()[2:6], non_blocking=True),
        {"upload": 1},
    ),
    "made there": (lambda x, i: torch.tensor([1, 2], device=DEVICE), {"unpinned": 1}),
    "times a number of the host": (lambda x, i: x * torch.tensor(2.0), {"launch": 1}),
    "attention": (
        lambda x, i: torch.nn.functional.scaled_dot_product_attention(
            x[None, None], x[None, None], x[None, None]
        ),
        {"launch": 1},
    ),
}


def counts(log: Log) -> dict[str, int]:
    kinds = ("launch", "sync", "upload", "unpinned", "download", "mix")
    return {kind: n for kind in kinds if (n := log.count(kind))}


def values(x: Tensor) -> Tensor:
    return x.held if isinstance(x, Counted) else x


# attention is taken apart by autograd before the device sees it
CASES = [(name, inference) for name in SNIPPETS for inference in (name == "attention", True)]


@pytest.mark.parametrize(("name", "inference"), sorted(set(CASES)))
def test_known_snippets_cost_what_is_known(name: str, inference: bool) -> None:
    snippet, cost = SNIPPETS[name]
    with counting(), torch.inference_mode(inference):
        x, index = there(3, 4), torch.tensor([0, 2], device=DEVICE)
        held, at = torch.arange(12.0).view(3, 4), torch.tensor([0, 2])
        with counting() as log:
            found = snippet(x, index)
        same = snippet(held, at)
    assert counts(log) == cost
    if isinstance(found, Tensor):
        assert torch.equal(values(found), values(same)), "values are those of the CPU"
        assert found.shape == same.shape


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x, h: x + h,
        lambda x, h: h + x,
        lambda x, h: x @ h.t(),
        lambda x, h: torch.cat([x, h]),
        lambda x, h: x.index_copy_(0, torch.tensor([0, 1, 2]), h.to(DEVICE)),
        lambda x, h: h[torch.tensor([0], device=DEVICE)],
        lambda x, h: torch.where(h > 0, x, x),
    ],
)
def test_a_mix_of_devices_is_an_error_as_on_cuda(
    mixed: Callable[[Tensor, Tensor], Tensor],
) -> None:
    with counting() as log:
        x = there(3, 4)
        with pytest.raises(RuntimeError, match="counted:0 and cpu"):
            mixed(x, torch.ones(3, 4))
    assert log.count("mix") == 1


def test_events_name_the_line() -> None:
    with counting() as log:
        x = there(3)
        x.sum().item()  # this line
    (line,) = log.lines("sync")
    number = int(line.split()[0].split(":")[-1])
    with open(__file__, encoding="utf-8") as file:
        assert "this line" in file.read().splitlines()[number - 1]


def test_what_other_threads_do_counts() -> None:
    with counting():
        x = there(3)
        with counting() as log:
            other = threading.Thread(target=lambda: x + torch.tensor([1.0] * 3, device=DEVICE))
            other.start()
            other.join()
    assert counts(log) == {"launch": 1, "unpinned": 1}


def test_nothing_is_counted_of_the_host() -> None:
    with counting() as log:
        torch.ones(3).add(1).sum().item()
    assert not log.events


def step(model: Any, cache: Cache, n: int) -> tuple[Log, Tensor]:
    """One decode step of transformers itself for ``n`` sequences: what it costs, its logits."""
    ids = torch.randint(3, 101, (n, 20), generator=torch.Generator().manual_seed(n))
    with torch.inference_mode():
        model(input_ids=ids[:, :-1].to(DEVICE), past_key_values=cache, use_cache=True)
        last = ids[:, -1:].to(DEVICE)
        with counting() as log:
            logits = model(input_ids=last, past_key_values=cache, use_cache=True).logits[:, -1]
    return log, logits.cpu()


@pytest.mark.parametrize("n", [1, 16])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_the_yardstick_is_transformers_own_decode(kind: Any, n: int) -> None:
    costs = {}
    for layers in (2, 4):
        changes = oracle.MODELS["llama"][1] | {"num_hidden_layers": layers}
        model = oracle.build("llama", changes).cpu()
        with torch.inference_mode():
            ids = torch.randint(3, 101, (n, 20), generator=torch.Generator().manual_seed(n))
            theirs = model(input_ids=ids).logits[:, -1]
        options = {"max_cache_len": 32} if kind is StaticCache else {}
        with counting():
            log, ours = step(model.to(DEVICE), kind(config=model.config, **options), n)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        assert log.count("sync") == log.count("unpinned") == log.count("mix") == 0
        costs[layers] = log.count("launch")
    # norms 2 x 6, projections 7, rotation 2 x 5, cache 2, attention 1, silu, product and two sums
    # 4: 36 at least; a cast, a copy or a mask more or less is a matter of the version
    per_layer = (costs[4] - costs[2]) / 2
    assert 34 <= per_layer <= 44
    assert costs[4] - 4 * per_layer <= 40


def test_what_is_added_up_in_order_is_what_scatter_add_adds() -> None:
    where, values = torch.tensor([[0, 2, 2], [1, 1, 0]]), torch.arange(6.0).view(2, 3)
    with counting():
        found = added(there(2, 3), where.to(DEVICE), values.to(DEVICE)).cpu()
    assert torch.equal(found, torch.arange(6.0).view(2, 3).scatter_add_(1, where, values))
