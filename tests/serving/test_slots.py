"""Keys and values at the slots of a paged cache: frames equal those of a draft with a cache of its own."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.drafter_cases import spread_weights
from ctcdraft.config.cli import compose_config
from ctcdraft.config.drafters import build_drafter
from ctcdraft.config.published_head import load_published_drafter, read_head_config
from ctcdraft.decoding.loop import Context
from ctcdraft.drafters.acceptance import AcceptanceModel
from ctcdraft.drafters.trees.per_frame import PerFrameTree
from ctcdraft.errors import InputError
from ctcdraft.models.loading import load_base
from ctcdraft.nn.heads import Emissions
from ctcdraft.serving import batch_drafter, served_head
from ctcdraft.serving.batch_drafter import BatchDrafter, DraftBatch
from ctcdraft.serving.chains import frame_chains
from ctcdraft.serving.served_head import ServedHead
from ctcdraft.serving.slot_cache import SlotCache, paged_texts

TINY = Path(__file__).parents[2] / "data" / "tiny"
SLOTS, BLOCKS = 4, 40  # slots of a block, blocks


def domino(base):
    """Return a head with random weights, of DFlash's body and a correction by the frames' hidden states."""
    sizes = ("drafter.frames=5", "drafter.body.blocks=2", "drafter.correction.rank=16", "drafter.correction.memory=24")
    torch.manual_seed(0)
    drafter = build_drafter(compose_config("train", "drafter=domino", *sizes).drafter, base)
    spread_weights(drafter)
    return drafter.for_inference(base)


@pytest.fixture(scope="module", params=["shipped", "domino"])
def head(request):
    base = load_base(str(TINY / "base"), "float32", "cpu", name="tiny", aux_layers=["last", 4, 11])
    if request.param == "domino":
        drafter = domino(base)
    else:
        drafter = load_published_drafter(TINY / "head", read_head_config(TINY / "head"), base)

    def frames(logits_QTC, depth, stops_S, correction, memory_QR):
        return logits_QTC.flatten(1), memory_QR  # what a search would get

    return ServedHead(drafter, frames, AcceptanceModel(), [0, 1, 2], 2048)


def frames_alone(head, states_LE, root):
    """Return frames and memory at the last state of a text."""
    drafter = head.drafter
    text = drafter.body.text_keys_values(drafter.input_states(states_LE[None]), torch.arange(len(states_LE))[None])
    states_1LD = drafter.input_states(states_LE[None])
    anchor_11D = states_1LD[:, -1:, : drafter.width]
    root_11 = torch.tensor([[root]])
    states = drafter.body(
        anchor_BAD=anchor_11D,
        root_BAD=drafter.embedding(root_11),
        anchors_BA=torch.tensor([[len(states_LE) - 1]]),
        text=text,
        visible_BAL=None,
    )
    emissions: Emissions = drafter.emissions(states, anchor_11D, root_11)
    return emissions.logits()[0, 0].flatten(), emissions.start_BAR[0, 0]


class Request:
    """A text whose states are known, a part of which was read."""

    def __init__(self, states_LE, blocks):
        self.states_LE, self.blocks, self.read = states_LE, blocks, 0

    def slots(self, start, end):
        return torch.tensor([self.blocks[p // SLOTS] * SLOTS + p % SLOTS for p in range(start, end)])


@pytest.mark.parametrize("read", ["in place", "copied"])
@torch.inference_mode()
def test_frames_equal_those_of_a_draft_on_random_schedules(head, read, monkeypatch):
    found = []
    if read == "copied":
        monkeypatch.setattr(batch_drafter, "paged_texts", lambda *unused: None)
    else:
        monkeypatch.setattr(batch_drafter, "paged_texts", lambda *given: found.append(paged_texts(*given)) or found[-1])
    rng = torch.Generator().manual_seed(3)

    def random(low, high):
        return int(torch.randint(low, high, (), generator=rng))

    drafter, columns = BatchDrafter(head), 3 * head.drafter.width
    shape = head.drafter.body.shape
    caches = [torch.zeros(BLOCKS, shape.kv_heads, SLOTS, 2 * shape.head_width) for _ in range(head.blocks)]
    drafter.bind(caches)
    free = torch.randperm(BLOCKS - 3, generator=rng).add(3).tolist()
    prefix_LE = torch.randn(2 * SLOTS, columns, generator=rng)
    shared = [1, 2]  # block 0 belongs to no request
    requests = []
    for _ in range(4):
        own_LE = torch.randn(24, columns, generator=rng)
        requests.append(Request(torch.cat([prefix_LE, own_LE]), [*shared, *(free.pop() for _ in range(6))]))
    for later in requests[1:]:
        later.read = len(prefix_LE)  # found in the prefix cache, written by the first request
    checked = alone = 0
    for step in range(12):
        order = torch.randperm(len(requests), generator=rng).tolist()
        if step == 0:
            order = [0]
        layers, positions, slots, asked, stays = [], [], [], [], []
        for number in order:
            request = requests[number]
            kept = random(1, 4) if step else len(prefix_LE) + 1
            end = min(request.read + kept, len(request.states_LE))
            rejected = min(random(0, 3), len(request.states_LE) - end)  # read too, and overwritten in a later step
            if end == request.read:
                continue
            junk_LE = torch.randn(rejected, columns, generator=rng)
            start = sum(map(len, layers))
            layers.append(torch.cat([request.states_LE[request.read : end], junk_LE]))
            positions.append(torch.arange(request.read, end + rejected))
            slots.append(request.slots(request.read, end + rejected))
            stays.extend(range(start, start + end - request.read))
            asked.append((number, len(stays) - 1, end - 1, random(5, 4000)))
            request.read = end
        layers.append(torch.full((2, columns), torch.nan))  # padding of a CUDA graph is undefined
        positions.append(torch.zeros(2, dtype=torch.int64))
        slots.append(torch.full((2,), -1))
        drafter.record(torch.cat(layers).chunk(3, dim=-1), torch.cat(positions), torch.cat(slots))
        if step % 3 == 1:  # nothing is drafted: states wait
            continue
        asked.sort(key=lambda one: one[2])
        alone += len(asked) == 1
        rows, anchors, roots = (torch.tensor([one[k] for one in asked]) for k in (1, 2, 3))
        table_QM = torch.zeros(len(asked), 8, dtype=torch.int64)  # vLLM fills up with block 0
        for row, (number, _, anchor, _) in enumerate(asked):
            used = anchor // SLOTS + 1
            table_QM[row, :used] = torch.tensor(requests[number].blocks[:used])
        batch = DraftBatch(rows, anchors, roots, table_QM, (anchors + 1).tolist(), torch.tensor(stays))
        logits_QX, memory_QR = drafter.draft(batch, 5)
        for row, (number, _, anchor, root) in enumerate(asked):
            expected_X, expected_R = frames_alone(head, requests[number].states_LE[: anchor + 1], root)
            torch.testing.assert_close(logits_QX[row], expected_X, atol=1e-4, rtol=1e-5)
            torch.testing.assert_close(memory_QR[row], expected_R, atol=1e-5, rtol=1e-5)
            checked += 1
    assert checked > 15
    assert alone > 0  # by machine code
    assert all(found)
    assert bool(found) == (read == "in place")


@torch.inference_mode()
def test_many_states_are_stored_without_a_draft_and_the_last_write_to_a_slot_counts(head, monkeypatch):
    monkeypatch.setattr(batch_drafter, "MAX_PENDING", 6)
    row_ids, used = SlotCache.row_ids, []
    monkeypatch.setattr(SlotCache, "row_ids", lambda self, slots: (used.append(slots), row_ids(self, slots))[1])
    shape, columns = head.drafter.body.shape, 3 * head.drafter.width
    states_LE, slots_L = torch.randn(12, columns), torch.arange(SLOTS, SLOTS + 12)
    drafter = BatchDrafter(head)
    drafter.bind([torch.zeros(4, shape.kv_heads, SLOTS, 2 * shape.head_width) for _ in range(head.blocks)])
    waiting = []
    for start in range(0, 12, 2):
        # Two tokens that stay, and a rejected one whose slot the next pass writes to.
        read = slice(start, start + 3)
        read_LE = torch.cat([states_LE[start : start + 2], torch.randn(1, columns)])[: len(slots_L[read])]
        drafter.record(read_LE.chunk(3, dim=-1), torch.arange(12)[read], slots_L[read])
        drafter.store_when_many()
        waiting.append(drafter.pending_tokens)
    assert waiting == [3, 6, 3, 6, 3, 5]
    last, table_1M = torch.tensor([1]), torch.tensor([[1, 2, 3]])
    frames_1X, _ = drafter.draft(DraftBatch(last, last + 10, last + 99, table_1M, [12], torch.arange(2)), 5)
    assert drafter.pending_tokens == 0
    whole_X, _ = frames_alone(head, states_LE, 100)
    torch.testing.assert_close(frames_1X[0], whole_X, atol=1e-4, rtol=1e-5)
    for slots in used:  # the order of several writes to a slot is undefined
        assert len(slots[slots > 0].unique()) == len(slots[slots > 0])


def test_of_several_writes_to_a_slot_the_last_one_stays(head):
    drafter = BatchDrafter(head)
    drafter.bind([torch.zeros(4, 1, SLOTS, 2)])
    for _ in range(2):
        assert drafter.last_writes(torch.tensor([5, 6, 7, 6, 9, 5])).tolist() == [0, 0, 7, 6, 9, 5]


def test_parts_of_a_batch_are_bounded_in_requests_and_in_padded_text():
    rows_Q = torch.arange(6)
    batch = DraftBatch(rows_Q, rows_Q, rows_Q, rows_Q[:, None], [2, 3, 3, 10, 11, 50], rows_Q)
    assert [part.lengths for part in batch.split(4, 22)] == [[2, 3, 3], [10, 11], [50]]
    assert [part.rows_Q.tolist() for part in batch.split(2, 1000)] == [[0, 1], [2, 3], [4, 5]]


@torch.inference_mode()
def test_a_batch_in_parts_gives_the_same_chains(head):
    drafter = BatchDrafter(replace(head, search=lambda logits_QTC, *_: (logits_QTC.flatten(1), logits_QTC[:, 0])))
    shape = head.drafter.body.shape
    drafter.bind([torch.zeros(8, shape.kv_heads, SLOTS, 2 * shape.head_width) for _ in range(head.blocks)])
    states_LE, results = torch.randn(5, 3 * head.drafter.width), []
    table_QM, ids = torch.tensor([[1, 2]] * 3), torch.tensor([2, 3, 4])
    for size in (8, 2):
        drafter.requests_at_once = size
        drafter.record(states_LE.chunk(3, dim=-1), torch.arange(5), torch.arange(4, 9))
        results.append(drafter.draft(DraftBatch(ids, ids, ids + 100, table_QM, [3, 4, 5], torch.arange(5)), 5)[0])
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_chains_of_frames_are_what_the_head_drafts_itself():
    base = load_base(str(TINY / "base"), "float32", "cpu", name="tiny", aux_layers=["last", 4, 11])
    with torch.inference_mode(False):
        drafter = domino(base)
    states_LE, tokens_L = torch.randn(6, 3 * drafter.width), torch.arange(20, 27)
    context = Context(tokens_L, states_LE, 40, 6)
    drafter.frame_tree = PerFrameTree(1)
    own, _ = drafter.draft(context, None, torch.Generator())
    served = BatchDrafter(ServedHead(drafter, frame_chains, AcceptanceModel(), [0, 1, 2], 2048))
    shape = drafter.body.shape
    served.bind([torch.zeros(8, shape.kv_heads, SLOTS, 2 * shape.head_width) for _ in range(2)])
    served.record(states_LE.chunk(3, dim=-1), torch.arange(6), torch.arange(4, 10))
    last = torch.tensor([5])
    tokens_QK, _ = served.draft(DraftBatch(last, last, tokens_L[-1:], torch.tensor([[1, 2]]), [6], torch.arange(6)), 5)
    assert tokens_QK[0].tolist() == own.tokens_N[1:].tolist()


def test_a_head_that_reads_tokens_is_refused(monkeypatch):
    base = load_base(str(TINY / "base"), "float32", "cpu", name="tiny", aux_layers=["last", 4, 11])
    peagle = build_drafter(compose_config("train", "drafter=peagle").drafter, base)
    monkeypatch.setattr(served_head, "load_published_drafter", lambda *unused: peagle)
    values = read_head_config(TINY / "head")
    with pytest.raises(InputError, match=r"reads the tokens of the text .* \(PEagleBody\), which are not recorded"):
        served_head.load_served_head(TINY / "head", values, str(TINY / "base"), None, print)


def test_warming_up_leaves_nothing_behind(head):
    drafter = BatchDrafter(replace(head, search=lambda logits_QTC, *_: (logits_QTC.flatten(1), logits_QTC[:, 0])))
    drafter.warm_up(5)
    assert drafter.caches == []
    assert drafter.pending == []
