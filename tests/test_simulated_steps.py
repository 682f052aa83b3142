"""Whole generations on the simulated accelerator with every drafter, eager and captured: tokens, and launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sequential_parts import saved_lm
from tiny_models import random_base

from benchmarks.drafter_cases import NAMES, drafter_cases
from benchmarks.launches import SEARCHES, Case
from benchmarks.simulated.capture import capture
from benchmarks.simulated.device import SETUP, UNSUPPORTED, active, count, device
from benchmarks.simulated.rules import DeviceError
from ctcdraft.decoding import loop, static_graphs
from ctcdraft.decoding.lossy_acceptance import TypicalAcceptance
from ctcdraft.decoding.settings import DecodingSettings
from ctcdraft.decoding.static_loop import StaticShapes
from ctcdraft.decoding.verification import match

pytestmark = pytest.mark.skipif(SETUP is None, reason=UNSUPPORTED)
PROMPT = torch.tensor([0, 7, 9, 9, 9, 30])


def settings(temperature: float) -> DecodingSettings:
    return DecodingSettings(
        max_new_tokens=16, nodes=16, temperature=temperature, top_k=0, top_p=1.0, verify=match, lossless=True
    )


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """A base and its drafters on the CPU, and the same on the device."""
    folder = saved_lm(tmp_path_factory.mktemp("draft_model"))
    on_cpu = random_base(context=128)
    cases = drafter_cases(on_cpu, folder)
    with active():
        on_device = random_base(context=128).to(device())
        return (on_cpu, cases), (on_device, drafter_cases(on_device, folder, like=cases))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_decodes_as_on_the_cpu(worlds, name, temperature):
    (cpu, cpu_cases), (base, cases) = worlds
    expected = loop.generate(cpu, cpu_cases[name], PROMPT, settings(temperature), frozenset(), 1)
    with count() as report:
        found = loop.generate(base, cases[name], PROMPT.to(device()), settings(temperature), frozenset(), 1)
    assert found.tokens == expected.tokens
    assert [step.committed for step in found.passes] == [step.committed for step in expected.passes]
    assert report.totals()["launches"] > 0


@pytest.mark.parametrize("name", ["ctc_gru", "eagle_dynamic"])
@pytest.mark.parametrize("verify", [match, TypicalAcceptance(0.09, 0.3)], ids=["match", "typical"])
def test_verification_waits_for_its_result_alone(worlds, name, verify, monkeypatch):
    """Also where the shape of a step is that of its tree, and no step is captured."""
    _, (base, cases) = worlds
    waits = {"verify": [], "of": []}

    def counted(key, function):
        def run(*arguments):
            with count() as report:
                result = function(*arguments)
            waits[key].append(report.synchronisations.total())
            return result

        return run

    monkeypatch.setattr(loop.AcceptedPath, "of", counted("of", loop.AcceptedPath.of))
    how = replace(settings(1.0), verify=counted("verify", verify), lossless=verify is match)
    with active():
        loop.generate(base, cases[name], PROMPT.to(device()), how, frozenset(), 1)
    assert len(waits["of"]) > 3
    assert {key: set(several) for key, several in waits.items()} == {"verify": {0}, "of": {1}}


def test_an_item_in_the_loop_is_counted(worlds, monkeypatch):
    _, (base, cases) = worlds

    def synchronisations():
        with count() as report:
            loop.generate(base, cases["ctc"], PROMPT.to(device()), settings(0.0), frozenset(), 1)
        return report.synchronisations.total()

    usual, extend = synchronisations(), loop.Context.extend
    monkeypatch.setattr(loop.Context, "extend", lambda self, *rest: (self.root.item(), extend(self, *rest))[1])
    assert synchronisations() > usual


def test_a_tensor_left_on_the_host_is_found(worlds, monkeypatch):
    _, (base, cases) = worlds
    monkeypatch.setattr(
        loop.Context, "extend", lambda self, path, states: torch.cat([self.tokens_L, torch.tensor(path.tokens)])
    )
    with pytest.raises(DeviceError, match="cat: operands on cpu"), count():
        loop.generate(base, cases["ctc"], PROMPT.to(device()), settings(0.0), frozenset(), 1)


@pytest.fixture
def captures(monkeypatch):
    """Let steps of fixed shapes be captured on the simulated device."""

    def capture_graph(function):
        with capture() as graph:
            function()
        return graph

    monkeypatch.setattr(static_graphs, "can_capture", lambda device: True)
    monkeypatch.setattr(static_graphs, "capture_graph", capture_graph)


CAPTURED = [name for name in NAMES if name not in ("prompt_lookup", "source_copy", "suffix", "merged")]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_steps_decode_as_on_the_cpu(worlds, captures, name, temperature):
    """The second text replays what the first has captured: a launch, a transfer, a synchronisation per step."""
    (cpu, cpu_cases), (base, cases) = worlds
    base.static_shapes = StaticShapes()
    try:
        for prompt in (PROMPT, torch.arange(40, 60)):
            expected = loop.generate(cpu, cpu_cases[name], prompt, settings(temperature), frozenset(), 1)
            on_device = prompt.to(device())
            with count() as report:
                found = loop.generate(base, cases[name], on_device, settings(temperature), frozenset(), 1)
            assert base.static_shapes.capture_error is None
            assert found.tokens == expected.tokens
    finally:
        base.static_shapes = None
    # Beside the steps: the prompt and its token, and one surplus step.
    assert sum(times for cause, times in report.launches.items() if "replay" in str(cause)) == len(found.passes) + 2
    assert report.totals()["synchronisations"] == len(found.passes) + 2


# Launches of a step beside the base's layers, 16 nodes: with kernels, and with searches in PyTorch where there are any.
BUDGETS = {
    "autoregressive": (6,), "ctc": (38, 301), "ctc_gru": (112, 608), "transducer": (95, 714), "medusa": (43,),
    "blockwise": (34,), "hydra": (41,), "eagle_static": (107,), "eagle_dynamic": (133,), "draft_model": (397,),
    "draft_model_dynamic": (409,), "dflash": (123,), "dspark": (134,), "domino": (350,), "peagle": (100,),
    "eagle3": (174,), "eagle3_1": (176,), "hydra_plus": (83,), "redrafter": (107,), "early_exit": (49,),
    "kangaroo": (115,),
}  # fmt: skip


@pytest.mark.parametrize("name", CAPTURED)
def test_a_step_waits_for_its_report_alone_and_keeps_to_its_budget(worlds, name):
    _, (base, cases) = worlds
    case = Case(base, PROMPT, settings(0.0), steps=2)
    for budget, in_torch in zip(BUDGETS[name], ((), SEARCHES), strict=False):
        step = case.count(cases[name], True, in_torch)
        assert step["synchronisations"] == step["transfers"] == 1
        assert step["beside"] <= budget
