"""Decodings that share passes give the texts that they give alone, whoever joins and leaves, and whenever."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

import mmdec
from mmdec.core.scheduler import Scheduler, SchedulerLimits, Task
from mmdec.drafters.corpus import CorpusDrafter, TokenIndex
from mmdec.errors import InputError
from mmdec.generation.generate import GenerateCall
from mmdec.generation.speculation import DecodingOptions, Speculation
from mmdec.targets.decoder import DecoderTarget
from mmdec.targets.families import FAMILIES
from mmdec.types import Round
from tests.exactness.enumeration import chi_square
from tests.support.draft_networks import FORMS_OF, tree_growing
from tests.support.families import model_of
from tests.support.grid import WHOLE, sample, slow_but
from tests.support.poisoned_memory import poisoned

# attention alone; with windows in no layer; recurrent and convolutional states; learned positions; latent keys
VARIED = (
    "LlamaForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoForCausalLM",
    "DeepseekV2ForCausalLM",
    "Mamba2ForCausalLM",
    "FalconH1ForCausalLM",
    "Lfm2ForCausalLM",
    "Qwen2ForCausalLM",
)


CORPUS = CorpusDrafter(TokenIndex.from_texts([random.Random(3).choices(range(3, 40), k=400)]))


@dataclass
class Request:
    """A call of `generate`, and the text that it gives alone."""

    model: PreTrainedModel
    ids: Tensor
    options: dict[str, Any]
    decoding: DecodingOptions
    rounds: list[Round] = field(default_factory=list)

    def single_text(self) -> list[list[int]]:
        options = {"drafter": None, "seed": self.decoding.seed, **self.options}
        return mmdec.generate(self.model, self.ids, **options).sequences.tolist()

    def prepare(self) -> Any:
        return GenerateCall.from_options(self.model, Speculation(self.decoding), self.options).prepare(self.ids)


def requests(model: PreTrainedModel, rng: random.Random, count: int) -> list[Request]:
    made = list[Request]()
    vocabulary = model.config.get_text_config().vocab_size
    for number in range(count):
        words = [rng.randrange(3, min(vocabulary, 60)) for _ in range(rng.randint(2, 20))]
        words += words[: rng.randint(0, len(words))]
        ids = torch.tensor([words, [rng.randrange(3, min(vocabulary, 60)) for _ in words]][: rng.choice([1, 1, 2])])
        sampled = rng.random() < 0.3
        options = {"max_new_tokens": rng.randint(1, 30), "do_sample": sampled}
        drafter: Any = rng.choice(["lookup", "recycling", "jacobi", CORPUS, None])
        nodes = rng.choice([1, 3, 7, (7, 3)]) if drafter else None
        decoding = DecodingOptions(drafter, None, nodes, seed=number if sampled else None)
        made.append(Request(model, ids, options, decoding))
    return made


FILLED = [(family, prefill) for family in VARIED for prefill in (5, 256)]  # prompts in parts, or whole
OTHERS = [
    (family, rng.choice([5, 256])) for rng in [random.Random(1)] for family in sorted(set(FAMILIES) - set(VARIED))
]


@pytest.mark.parametrize(
    ("family", "prefill"), slow_but(sample(FILLED + OTHERS, FILLED[::4] + FILLED[3::4]), slice(None, None, 3))
)
def test_rows_that_join_and_leave_keep_their_texts(family: str, prefill: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rng = model_of(family), random.Random(prefill)
    shared, score_together = list[int](), DecoderTarget.score_together

    def record_parts(target: DecoderTarget, parts: Any) -> Any:
        shared.append(len(parts))
        return score_together(target, parts)

    monkeypatch.setattr(DecoderTarget, "score_together", record_parts)
    asked = requests(model, rng, 8)
    expected = [request.single_text() for request in asked]
    scheduler = Scheduler(SchedulerLimits(max_rows=5, max_prompt_tokens_per_step=prefill))
    tasks, runs = list[Task](), [request.prepare() for request in asked]
    waiting = list(zip(asked, runs, strict=True))
    with poisoned():
        while waiting or scheduler.running or scheduler.waiting:
            while waiting and (rng.random() < 0.4 or not scheduler.running):
                request, run = waiting.pop(0)
                tasks.append(
                    scheduler.add(run.steps, run.rows, priority=rng.randint(0, 2), on_round=request.rounds.append)
                )
            scheduler.step()
    assert [task.error for task in tasks] == [None] * len(tasks)
    assert [run.sequences.tolist() for run in runs] == expected
    # GPT-Neo takes a token's cache index as its position, so that its rows cannot move
    assert bool(shared) == (family != "GPTNeoForCausalLM") or family not in VARIED


ROUNDS = 10_000 if WHOLE else 300


def test_a_long_run_of_changing_requests_has_no_wrong_token() -> None:
    """Requests of two models come and go, some cancelled, until all rounds have run."""
    rng, rounds, wrong = random.Random(7), 0, list[str]()
    models = [model_of("LlamaForCausalLM"), model_of("Lfm2ForCausalLM")]
    scheduler = Scheduler(SchedulerLimits(max_rows=8, max_prompt_tokens_per_step=7))
    running = dict[Task, tuple[Request, Any]]()
    while rounds < ROUNDS:
        while len(running) < 9:
            (request,) = requests(rng.choice(models), rng, 1)
            run = request.prepare()
            task = scheduler.add(run.steps, run.rows, priority=rng.randint(0, 2), on_round=request.rounds.append)
            running[task] = request, run
        scheduler.step()
        if rng.random() < 0.02:
            task = rng.choice(list(running))
            scheduler.cancel(task)
            del running[task]
        for task in [task for task in running if task.done]:
            request, run = running.pop(task)
            rounds += len(request.rounds)
            if task.error is not None or run.sequences.tolist() != request.single_text():
                wrong.append(f"{request}: {task.error}")
    assert wrong == []


@pytest.mark.parametrize("form", slow_but(FORMS_OF["heads"], ("medusa", "amphista", "hydra++", "redrafter", "mlp")))
def test_heads_that_keep_a_state_join_and_leave(form: str) -> None:
    """Greedy and sampled, in chains and trees, as rows of one batch and as requests that share passes."""
    model, rng = model_of("LlamaForCausalLM"), random.Random(form)
    asked = requests(model, rng, 6)
    drafter = tree_growing("heads", model, **FORMS_OF["heads"][form])
    for request in asked:
        nodes = rng.choice([1, 3, (7, 3)])
        request.decoding = DecodingOptions(drafter, None, nodes, seed=request.decoding.seed)
    expected = [request.single_text() for request in asked]
    scheduler, runs = Scheduler(SchedulerLimits(max_rows=5)), [request.prepare() for request in asked]
    with poisoned():
        for request, run in zip(asked, runs, strict=True):
            scheduler.add(run.steps, run.rows, on_round=request.rounds.append)
            for _ in range(rng.randint(0, 3)):
                scheduler.step()
        while scheduler.running or scheduler.waiting:
            scheduler.step()
    assert [run.sequences.tolist() for run in runs] == expected
    assert any(max(round_.drafted) > 1 for request in asked for round_ in request.rounds)


@pytest.mark.parametrize(
    ("drafter", "rule"),
    slow_but(
        [
            ("lookup", "sampled"),
            ("small", "residual"),
            ("small", "traversal"),
            ("heads", "residual"),
            ("heads", "traversal"),
        ],
        [("small", "residual"), ("heads", "traversal")],
    ),
)
def test_rows_of_a_shared_batch_are_samples_of_the_model(drafter: str, rule: Any) -> None:
    """Texts of three tokens over many seeds follow the model's distribution, in batches that rows join and leave."""
    model, small = model_of("LlamaForCausalLM"), model_of("LlamaForCausalLM", seed=1)
    heads = tree_growing("heads", model, prefix_layer=True)
    # a small vocabulary, so that each text is expected often enough
    allowed = [5, 6, 7, 8]
    banned = torch.tensor([token for token in range(model.config.vocab_size) if token not in allowed])
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": True, "suppress_tokens": banned.tolist()}
    ids, count = torch.tensor([[5, 6, 5, 7, 5, 6]]), 2400 if WHOLE else 250
    scheduler, rng, runs = Scheduler(SchedulerLimits(max_rows=16)), random.Random(2), list[Any]()
    while len(runs) < count or scheduler.running or scheduler.waiting:
        while len(runs) < count and len(scheduler.running) < 16 and rng.random() < 0.8:
            source: Any = {"small": small, "heads": heads}.get(drafter, drafter)
            decoding = DecodingOptions(source, rule, 2, seed=len(runs))
            runs.append(GenerateCall.from_options(model, Speculation(decoding), options).prepare(ids))
            scheduler.add(runs[-1].steps)
        scheduler.step()
    counts = Counter(tuple(run.sequences[0, ids.shape[1] :].tolist()) for run in runs)
    distribution = dict[tuple[int, ...], float]()
    for text in product(allowed, repeat=3):
        probability = 1.0
        for place, token in enumerate(text):
            before = torch.cat([ids, torch.tensor([text[:place]], dtype=torch.long)], 1)
            logits = model(before).logits[0, -1].detach().double()
            logits[banned] = -torch.inf
            probability *= float(logits.softmax(-1)[token])
        distribution[text] = probability
    assert chi_square(counts, distribution) < 10


def test_an_error_or_a_cancelled_request_leaves_its_neighbours_alone() -> None:
    model = model_of("LlamaForCausalLM")
    asked = requests(model, random.Random(3), 4)
    for request in asked:
        request.options["max_new_tokens"] = 24
    expected = [request.single_text() for request in asked]
    scheduler, runs = Scheduler(), [request.prepare() for request in asked]

    def refuse(round_: Round) -> None:
        if round_.index == 2:
            raise RuntimeError("the callback of one request")

    tasks = [
        scheduler.add(run.steps, run.rows, on_round=refuse if number == 1 else None) for number, run in enumerate(runs)
    ]
    for _ in range(4):
        scheduler.step()
    scheduler.cancel(tasks[2])
    assert [task.done for task in tasks] == [False, True, True, False]
    scheduler.run()
    assert str(tasks[1].error) == "the callback of one request"
    assert [tasks[number].error for number in (0, 2, 3)] == [None] * 3
    assert [runs[number].sequences.tolist() for number in (0, 3)] == [expected[0], expected[3]]


def test_a_failing_pass_ends_the_request_at_fault() -> None:
    """A processor of one request raises; it is called when its own scores are read, not in the shared pass."""
    model = model_of("LlamaForCausalLM")
    asked = requests(model, random.Random(4), 3)
    expected = [request.single_text() for request in asked]

    def fail(ids: Tensor, scores: Tensor) -> Tensor:
        raise ValueError("the processor of one request")

    asked[1].options["logits_processor"] = [fail]
    scheduler, runs = Scheduler(), [request.prepare() for request in asked]
    tasks = [scheduler.add(run.steps) for run in runs]
    scheduler.run()
    assert str(tasks[1].error) == "the processor of one request"
    assert [runs[number].sequences.tolist() for number in (0, 2)] == [expected[0], expected[2]]


def test_what_does_not_fit_waits_and_what_never_fits_is_refused() -> None:
    model = model_of("LlamaForCausalLM")
    scheduler = Scheduler(SchedulerLimits(max_rows=2, max_cache_tokens=100))
    runs = [request.prepare() for request in requests(model, random.Random(5), 4)]
    with pytest.raises(InputError, match=r"`tokens` must be at most 100, .* but is 101"):
        scheduler.add(runs[0].steps, tokens=101)
    with pytest.raises(InputError, match="`rows` must be at most 2, but is 3"):
        scheduler.add(runs[0].steps, rows=3)
    order = list[int]()
    priorities = (1, 1, 0, 1)
    for number, run in enumerate(runs):
        scheduler.add(
            run.steps,
            tokens=60,
            priority=priorities[number],
            on_round=lambda round_, number=number: order.append(number) if not round_.index else None,
        )
    most = 0
    while scheduler.step():
        most = max(most, len(scheduler.running))
    assert most == 1  # two of 60 tokens do not fit into 100
    assert order == [2, 0, 1, 3]


def test_a_list_of_prompts_gives_each_prompts_own_text() -> None:
    model = model_of("LlamaForCausalLM")
    prompts = [request.ids for request in requests(model, random.Random(6), 6)]
    together = mmdec.generate(model, prompts, drafter="lookup", batch_size=3, max_new_tokens=12)
    for prompt, generation in zip(prompts, together, strict=True):
        single = mmdec.generate(model, prompt, drafter=None, max_new_tokens=12)
        assert generation.sequences.tolist() == single.sequences.tolist()
        assert generation.finish_reasons == single.finish_reasons
    sampled = mmdec.generate(model, prompts, drafter="lookup", batch_size=2, seed=5, do_sample=True, max_new_tokens=8)
    for number, prompt in enumerate(prompts):
        single = mmdec.generate(model, prompt, drafter=None, seed=5 + number, do_sample=True, max_new_tokens=8)
        assert sampled[number].sequences.tolist() == single.sequences.tolist()


def test_a_refused_prompt_costs_its_neighbours_nothing() -> None:
    """Prompts may be refused before they are read, when transformers prepares them, or in their first pass."""
    model = model_of("LlamaForCausalLM")
    good = [request.ids for request in requests(model, random.Random(9), 4)]
    no_end = {"input_ids": good[0], "attention_mask": torch.ones_like(good[0])}
    no_end["attention_mask"][:, -1] = 0
    long = torch.full((1, 60), 5)
    prompts: list[Any] = [good[0], "what?", good[1], torch.tensor([[10**6]]), long, good[2], no_end, good[3]]
    bad = {
        1: "must be token ids",
        3: "must be between 0 and",
        4: "`max_length` is set to 48",
        6: "must be 1 at the end",
    }
    with pytest.raises(mmdec.BatchError, match="4 of 8 prompts were rejected, the first at index 1") as refused:
        mmdec.generate(model, prompts, drafter="lookup", batch_size=2, max_length=48)
    assert list(refused.value.errors) == list(bad)
    for index, message in bad.items():
        assert message in str(refused.value.errors[index])
        assert refused.value.errors[index].__traceback__ is None
    for index, prompt in enumerate(prompts):
        if index in bad:
            assert refused.value.results[index] is None
            continue
        single = mmdec.generate(model, prompt, drafter=None, max_length=48)
        assert refused.value.results[index].sequences.tolist() == single.sequences.tolist()


def test_seeds_of_a_list_go_on_at_zero() -> None:
    model = model_of("LlamaForCausalLM")
    prompts = [request.ids for request in requests(model, random.Random(4), 2)]
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 6}
    together = mmdec.generate(model, prompts, seed=2**64 - 1, **options)
    last = mmdec.generate(model, prompts[1], seed=0, **options)
    assert together[1].sequences.tolist() == last.sequences.tolist()


def test_a_processor_that_counts_reads_one_prompt_after_another() -> None:
    """It forbids a token at every third call, so that it must not be called for another prompt in between."""

    class Counter:
        calls = 0

        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            self.calls += 1
            return scores if self.calls % 3 else scores.index_fill(1, scores.argmax(1), -torch.inf)

    model = model_of("LlamaForCausalLM")
    prompts = [torch.tensor([[5, 6, number]]) for number in range(7, 12)]
    options: dict[str, Any] = {"drafter": None, "max_new_tokens": 7}
    counter = Counter()
    expected = [
        mmdec.generate(model, prompt, logits_processor=[counter], **options).sequences.tolist() for prompt in prompts
    ]
    together = mmdec.generate(model, prompts, logits_processor=[Counter()], **options)
    assert [generation.sequences.tolist() for generation in together] == expected


def test_a_processors_stop_iteration_reaches_the_caller() -> None:
    def stop(*_: object) -> Tensor:
        raise StopIteration("mine")

    ids = torch.tensor([[5, 6, 7]])
    for prompts in (ids, [ids, ids]):
        with pytest.raises(StopIteration, match="mine"):
            mmdec.generate(model_of("LlamaForCausalLM"), prompts, max_new_tokens=4, logits_processor=[stop])


def test_a_mistake_in_the_call_is_no_prompts() -> None:
    model = model_of("LlamaForCausalLM")
    for options in ({"num_beams": 2}, {"drafter": "no-such-drafter"}, {"dtype": torch.float64}):
        with pytest.raises(InputError) as refused:
            mmdec.generate(model, [torch.tensor([[5, 6, 7]])] * 2, max_new_tokens=4, **options)
        assert not isinstance(refused.value, mmdec.BatchError)


def test_a_given_configuration_leaves_sampling_to_the_models_own() -> None:
    """`GenerationConfig()` sets no `do_sample`; transformers then takes the model's."""
    model = model_of("LlamaForCausalLM")
    config, model.generation_config.do_sample = GenerationConfig(max_new_tokens=12), True
    prompts = [torch.tensor([[5, 6, 7]])] * 3
    sampled = mmdec.generate(model, prompts, drafter=None, seed=7, generation_config=config)
    assert len({tuple(each.sequences[0].tolist()) for each in sampled}) == 3


def test_a_callback_may_cancel_another_request() -> None:
    model = model_of("LlamaForCausalLM")
    asked = requests(model, random.Random(8), 3)
    for request in asked:
        request.options["max_new_tokens"] = 24
    expected = asked[2].single_text()
    scheduler, runs = Scheduler(), [request.prepare() for request in asked]
    tasks = [scheduler.add(run.steps, run.rows) for run in runs[:1]]
    scheduler.step()
    scheduler.step()
    cancel = lambda round_: None if round_.index else scheduler.cancel(tasks[0])  # noqa: E731
    tasks += [scheduler.add(run.steps, run.rows, on_round=cancel) for run in runs[1:]]
    scheduler.run()
    assert [task.error for task in tasks] == [None] * 3
    assert runs[2].sequences.tolist() == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tempature": 0.5}, "`tempature` must be an option of this call"),
        ({"max_new_tokens": -1}, "`max_new_tokens` must be greater than 0"),
        ({"stop_strings": "a"}, "`tokenizer` must be given with `stop_strings`"),
        ({"rule": "residual", "do_sample": False}, "`rule` must fit `do_sample`"),
        ({"generation_config": 3}, "`generation_config` must be a GenerationConfig"),
        ({"generation_config": GenerationConfig(num_beams=3)}, "`num_beams` must be 1, but is 3"),
        ({"temperature": 0.0, "do_sample": True}, "has to be a strictly positive float"),
        ({"attention_mask": 3}, "`attention_mask` must be a tensor, but is 3"),
    ],
)
def test_a_mistake_in_the_options_is_no_prompts_own(options: dict[str, Any], message: str) -> None:
    """It is raised at once, even behind a prompt that is refused for itself."""
    prompts: list[Any] = ["what?", torch.tensor([[5, 6]]), torch.tensor([[7]])]
    with pytest.raises(InputError, match=message) as refused:
        mmdec.generate(model_of("LlamaForCausalLM"), prompts, drafter="lookup", **{"max_new_tokens": 4, **options})
    assert not isinstance(refused.value, mmdec.BatchError)


def test_options_that_are_inputs_or_only_keywords_serve_every_prompt_of_a_list() -> None:
    """They are not among the settings that are checked before the first prompt."""
    model, prompts = model_of("LlamaForCausalLM"), [torch.tensor([[5, 6, 7, 8]]), torch.tensor([[9, 7, 9, 7]])]
    mask = torch.tensor([[0, 1, 1, 1]])
    options: dict[str, Any] = {"attention_mask": mask, "trust_remote_code": True}
    together = mmdec.generate(model, prompts, max_new_tokens=6, **options)
    for prompt, generation in zip(prompts, together, strict=True):
        single = mmdec.generate(model, {"input_ids": prompt, "attention_mask": mask}, drafter=None, max_new_tokens=6)
        assert generation.sequences.tolist() == single.sequences.tolist()


def test_batch_size_holds_the_rows_of_each_prompt() -> None:
    model = model_of("LlamaForCausalLM")
    ids = torch.tensor([[5, 6, 7]] * 3)
    with pytest.raises(InputError, match=r"`batch_size` must be at least 3, .* but is 2"):
        mmdec.generate(model, [ids], batch_size=2, max_new_tokens=4)
    with pytest.raises(InputError, match="`batch_size` must"):
        mmdec.generate(model, [ids], batch_size=0, max_new_tokens=4)
    assert mmdec.generate(model, [], max_new_tokens=4) == []
