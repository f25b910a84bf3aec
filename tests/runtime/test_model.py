"""The decoder: both ways through it agree, shards add up, and a folder loads as it was written."""

import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvlift.core.keys import Namespace
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.runtime.worker.generation import Sampling
from kvlift.runtime.worker.loading import ModelSource
from kvlift.runtime.worker.model import Decoder, PagedKv, paged_batch, paged_kv
from kvlift.runtime.worker.model_config import (
    ModelConfig,
    ModelRefusedError,
    config_from_folder,
    config_from_mapping,
    tiny,
)
from kvlift.runtime.worker.plain_engine import plain_scores
from kvlift.runtime.worker.prefill_engine import PrefillEngine
from kvlift.runtime.worker.sampling import sample, sample_rows
from kvlift.runtime.worker.weights import Shard, random_weights

CPU = torch.device("cpu")
PAGE = 8
torch.set_num_threads(1)


def some_tokens(n_tokens: int, seed: int = 1, vocab: int = 1024) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(0, vocab, (n_tokens,), generator=generator).tolist()
    return drawn


def decoder_of(config: ModelConfig, shard: Shard | None = None) -> Decoder:
    part = shard or Shard()
    return Decoder(config, random_weights(config, seed=3, shard=part, device=CPU), part)


def plain_logprobs(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    logits, _ = decoder.plain_forward(torch.tensor(tokens))
    return torch.log_softmax(logits, dim=-1)


STYLES = [
    tiny(),
    ModelConfig(name="qwen2", n_layers=2, qkv_bias=True, tied_embeddings=True),
    ModelConfig(name="qwen3", n_layers=2, qk_norm=True, head_dim=64),
]


@pytest.mark.parametrize("config", STYLES, ids=lambda config: config.name)
def test_pages_in_any_order_give_the_log_probabilities_of_a_plain_forward(
    config: ModelConfig,
) -> None:
    decoder = decoder_of(config)
    tokens = some_tokens(43)
    table = [5, 2, 9, 0, 7, 3]
    kv = paged_kv(config, n_pages=12, page_tokens=PAGE, shard=Shard(), device=CPU)
    wanted = plain_logprobs(decoder, tokens)
    for start, stop in ((0, 11), (11, 30), (30, 42), (42, 43)):
        batch = paged_batch(
            [(tokens[start:stop], start, table)],
            page_tokens=PAGE,
            n_written_first=[start],
            device=CPU,
        )
        found = torch.log_softmax(decoder.logits(decoder.paged_forward(batch, kv)[0]), dim=-1)
        assert (found - wanted[start:stop]).abs().max() < 1e-4


def test_a_padded_batch_of_different_lengths_is_the_same_as_each_row_alone() -> None:
    decoder = decoder_of(tiny())
    rows = [some_tokens(n_tokens, seed=n_tokens) for n_tokens in (3, 17, 30)]
    tables = [[1], [4, 0, 6], [2, 3, 5, 7]]
    kv = paged_kv(tiny(), n_pages=8, page_tokens=PAGE, shard=Shard(), device=CPU)
    for tokens, table in zip(rows, tables, strict=True):
        batch = paged_batch(
            [(tokens[:-1], 0, table)], page_tokens=PAGE, n_written_first=[0], device=CPU
        )
        decoder.paged_forward(batch, kv)
    batch = paged_batch(
        [(tokens[-1:], len(tokens) - 1, table) for tokens, table in zip(rows, tables, strict=True)],
        page_tokens=PAGE,
        n_written_first=[len(tokens) - 1 for tokens in rows],
        device=CPU,
    )
    found = torch.log_softmax(decoder.logits(decoder.paged_forward(batch, kv)[:, -1]), dim=-1)
    for row, tokens in zip(found, rows, strict=True):
        assert (row - plain_logprobs(decoder, tokens)[-1]).abs().max() < 1e-4


def test_a_row_that_only_reads_leaves_the_pages_as_they_were() -> None:
    decoder = decoder_of(tiny())
    tokens = some_tokens(16)
    kv = paged_kv(tiny(), n_pages=2, page_tokens=PAGE, shard=Shard(), device=CPU)
    whole = paged_batch([(tokens, 0, [0, 1])], page_tokens=PAGE, n_written_first=[0], device=CPU)
    decoder.paged_forward(whole, kv)
    before = [(k.clone(), v.clone()) for k, v in kv.layers]
    again = paged_batch(
        [(tokens[-1:], 15, [0, 1])], page_tokens=PAGE, n_written_first=[16], device=CPU
    )
    found = torch.log_softmax(decoder.logits(decoder.paged_forward(again, kv)[0, -1]), dim=-1)
    assert (found - plain_logprobs(decoder, tokens)[-1]).abs().max() < 1e-4
    for (k, v), (k_before, v_before) in zip(kv.layers, before, strict=True):
        assert torch.equal(k, k_before)
        assert torch.equal(v, v_before)


def test_a_damaged_page_changes_the_log_probabilities() -> None:
    decoder = decoder_of(tiny())
    tokens = some_tokens(24)
    kv = paged_kv(tiny(), n_pages=3, page_tokens=PAGE, shard=Shard(), device=CPU)
    first = paged_batch(
        [(tokens[:-1], 0, [0, 1, 2])], page_tokens=PAGE, n_written_first=[0], device=CPU
    )
    decoder.paged_forward(first, kv)
    kv.layers[0][0][:PAGE].zero_()
    last = paged_batch(
        [(tokens[-1:], 23, [0, 1, 2])], page_tokens=PAGE, n_written_first=[23], device=CPU
    )
    found = torch.log_softmax(decoder.logits(decoder.paged_forward(last, kv)[0, -1]), dim=-1)
    assert (found - plain_logprobs(decoder, tokens)[-1]).abs().max() > 1e-2


class Summing:
    """A real all-reduce between threads: adds, and gives every one the same sum."""

    def __init__(self, n_ranks: int) -> None:
        self._parts: list[torch.Tensor | None] = [None] * n_ranks
        self._barrier = threading.Barrier(n_ranks, timeout=20)

    def reduce(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        self._parts[rank] = tensor
        self._barrier.wait()
        total = torch.stack([part for part in self._parts if part is not None]).sum(0)
        self._barrier.wait()
        return total


@pytest.mark.parametrize("config", STYLES, ids=lambda config: config.name)
def test_two_ranks_compute_what_one_computes(config: ModelConfig) -> None:
    tokens = some_tokens(20)
    wanted = plain_logprobs(decoder_of(config), tokens)
    summing = Summing(2)
    found: dict[int, torch.Tensor] = {}

    def compute(rank: int) -> None:
        part = Shard(rank=rank, n_ranks=2)
        weights = random_weights(config, seed=3, shard=part, device=CPU)
        decoder = Decoder(config, weights, part, lambda tensor: summing.reduce(rank, tensor))
        found[rank] = plain_logprobs(decoder, tokens)

    threads = [threading.Thread(target=compute, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert torch.equal(found[0], found[1])
    assert (found[0] - wanted).abs().max() < 1e-4


def test_more_ranks_than_kv_heads_is_refused_with_what_to_do() -> None:
    with pytest.raises(ModelRefusedError, match="choose a number of ranks"):
        decoder_of(tiny(), Shard(rank=0, n_ranks=4))


def prompt_of(tokens: list[int]) -> Prompt:
    return Prompt(Namespace(page_tokens=PAGE).digest(), token_bytes(tokens), PAGE)


def test_prefill_streams_pages_and_agrees_with_a_plain_forward_on_kv_and_first_token() -> None:
    decoder = decoder_of(tiny())
    tokens = some_tokens(45)
    engine = PrefillEngine(decoder, PAGE, chunk_tokens=12)
    run = engine.start(prompt_of(tokens))
    n_pages_seen = [run.n_pages_done]
    while not run.is_done:
        engine.step(run)
        n_pages_seen.append(run.n_pages_done)
    assert n_pages_seen == [0, 1, 3, 4, 6]
    logits, layers = decoder.plain_forward(torch.tensor(tokens))
    assert run.first is not None
    assert run.first.token == int(logits[-1].argmax())
    assert abs(run.first.logprob - float(logits[-1].log_softmax(-1).max())) < 1e-4
    for rank in range(2):
        raw = run.page_bytes(2, rank=rank, n_ranks=2)
        page = torch.frombuffer(bytearray(raw), dtype=torch.float32)
        page = page.view(tiny().n_layers, 2, PAGE, 1, tiny().head_dim)
        for layer, (k, v) in enumerate(layers):
            assert (page[layer, 0, :, 0] - k[16:24, rank]).abs().max() < 1e-4
            assert (page[layer, 1, :, 0] - v[16:24, rank]).abs().max() < 1e-4


def test_prefill_reuses_whole_pages_of_an_equal_prefix_and_no_others() -> None:
    engine = PrefillEngine(decoder_of(tiny()), PAGE, chunk_tokens=64)
    tokens = some_tokens(32)
    first = engine.start(prompt_of(tokens))
    engine.step(first)
    again = engine.start(prompt_of(tokens))
    assert again.n_reused == 24  # the last token is computed again, so its page is too
    branch = engine.start(prompt_of([*tokens[:20], *some_tokens(20, seed=9)]))
    assert branch.n_reused == 16
    engine.step(branch)
    logits, _ = engine.decoder.plain_forward(torch.tensor(branch.token_ids))
    assert branch.first is not None
    assert abs(branch.first.logprob - float(logits[-1].log_softmax(-1).max())) < 1e-4
    elsewhere = Prompt(
        Namespace(page_tokens=PAGE, tenant="blue").digest(), token_bytes(tokens), PAGE
    )
    assert engine.start(elsewhere).n_reused == 0


def test_the_prefix_cache_of_prefill_stays_within_its_bound() -> None:
    engine = PrefillEngine(decoder_of(tiny()), PAGE, n_cached_pages_max=3)
    for seed in range(3):
        engine.step(engine.start(prompt_of(some_tokens(40, seed=seed))))
        assert engine.n_cached_pages == 3


@pytest.mark.parametrize(
    ("tokens", "page_tokens", "message"),
    [([], PAGE, "at least one"), ([5000], PAGE, "vocabulary"), ([1], 4, "same page size")],
)
def test_prefill_refuses_a_prompt_that_it_cannot_compute(
    tokens: list[int], page_tokens: int, message: str
) -> None:
    engine = PrefillEngine(decoder_of(tiny()), PAGE)
    bad = Prompt(Namespace().digest(), token_bytes(tokens), page_tokens)
    with pytest.raises(ValueError, match=message):
        engine.start(bad)


def test_random_logits_are_decided_and_not_constant() -> None:
    decoder = decoder_of(tiny())
    logprobs = plain_logprobs(decoder, some_tokens(64))
    best = logprobs.max(dim=-1)
    assert torch.unique(best.indices).numel() > 40
    assert -6 < float(best.values.mean()) < -0.1


def test_a_drawn_token_depends_on_seed_and_place_alone() -> None:
    logits = torch.linspace(0, 3, 50)
    sampling = Sampling(temperature=0.9, seed=4)
    drawn = [sample(logits, sampling, place)[0] for place in range(30)]
    assert drawn == [sample(logits, sampling, place)[0] for place in range(30)]
    assert len(set(drawn)) > 5
    narrow = Sampling(temperature=0.9, top_p=0.0001, seed=4)
    assert {sample(logits, narrow, place)[0] for place in range(30)} == {49}
    few = Sampling(temperature=5.0, top_k=2, seed=4)
    assert {sample(logits, few, place)[0] for place in range(40)} == {48, 49}


def test_the_log_probability_is_the_models_own() -> None:
    logits = torch.tensor([0.0, 1.0, 3.0])
    token, logprob = sample(logits, Sampling(temperature=0.0), 0)
    assert token == 2
    assert logprob == pytest.approx(float(logits.log_softmax(-1)[2]))


def test_rows_are_sampled_as_each_of_them_alone() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3)) * 3
    drawn = Sampling(temperature=0.9, seed=4)
    asked = [(Sampling(temperature=0.0), 7), (drawn, 8), (Sampling(top_k=1), 9), (drawn, 10)]
    rows = sample_rows(logits, asked)
    alone = [sample(logits[n], how, place) for n, (how, place) in enumerate(asked)]
    assert [token for token, _ in rows] == [token for token, _ in alone]
    assert [lp for _, lp in rows] == pytest.approx([lp for _, lp in alone])


def test_a_decode_step_never_waits_for_the_device_before_it_has_its_logits() -> None:
    """On the meta device nothing has a value, so that whatever asks for one raises."""
    meta = torch.device("meta")
    config, shard = tiny(), Shard()
    decoder = Decoder(config, random_weights(config, seed=3, shard=shard, device=meta), shard)
    kv = paged_kv(config, n_pages=6, page_tokens=PAGE, shard=shard, device=meta)
    rows = [([5], 9, [0, 1]), ([6, 7], 3, [2, 3])]
    batch = paged_batch(rows, page_tokens=PAGE, n_written_first=[9, 4], device=meta)
    assert decoder.logits(decoder.paged_forward(batch, kv)).shape == (2, 2, config.vocab)
    with pytest.raises(NotImplementedError):
        batch.positions[batch.positions >= 0]


def hf_folder(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Write a Hugging Face folder in two shards, with weights of its own making."""
    q_width = config.n_heads * config.head_dim
    kv_width = config.n_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab, config.hidden),
        "lm_head.weight": (config.vocab, config.hidden),
        "model.norm.weight": (config.hidden,),
    }
    for index in range(config.n_layers):
        at = f"model.layers.{index}."
        shapes |= {
            f"{at}input_layernorm.weight": (config.hidden,),
            f"{at}post_attention_layernorm.weight": (config.hidden,),
            f"{at}self_attn.q_proj.weight": (q_width, config.hidden),
            f"{at}self_attn.k_proj.weight": (kv_width, config.hidden),
            f"{at}self_attn.v_proj.weight": (kv_width, config.hidden),
            f"{at}self_attn.q_proj.bias": (q_width,),
            f"{at}self_attn.k_proj.bias": (kv_width,),
            f"{at}self_attn.v_proj.bias": (kv_width,),
            f"{at}self_attn.o_proj.weight": (config.hidden, q_width),
            f"{at}mlp.gate_proj.weight": (config.intermediate, config.hidden),
            f"{at}mlp.up_proj.weight": (config.intermediate, config.hidden),
            f"{at}mlp.down_proj.weight": (config.hidden, config.intermediate),
        }
    generator = torch.Generator().manual_seed(11)
    tensors = {
        name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, str(folder / "a.safetensors"))
    save_file({name: tensors[name] for name in names[1::2]}, str(folder / "b.safetensors"))
    raw = {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "vocab_size": config.vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "eos_token_id": [7, 8],
        "use_sliding_window": False,
        "sliding_window": 4096,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    return tensors


def naive_last_logits(
    tensors: dict[str, torch.Tensor], config: ModelConfig, tokens: list[int]
) -> torch.Tensor:
    """The same model written a second time, token by token and head by head."""

    def norm(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return row / (row.square().mean() + config.rms_eps).sqrt() * weight

    def rotated(head: torch.Tensor, at: int) -> torch.Tensor:
        half = config.head_dim // 2
        turned = head.clone()
        for i in range(half):
            angle = torch.tensor(at / config.rope_theta ** (2 * i / config.head_dim))
            a, b = head[i], head[i + half]
            turned[i] = a * angle.cos() - b * angle.sin()
            turned[i + half] = b * angle.cos() + a * angle.sin()
        return turned

    rows = [tensors["model.embed_tokens.weight"][token] for token in tokens]
    dim, group = config.head_dim, config.n_heads // config.n_kv_heads
    for index in range(config.n_layers):
        at = f"model.layers.{index}."
        projected = []
        for row in rows:
            normed = norm(row, tensors[f"{at}input_layernorm.weight"])
            projected.append(
                [
                    tensors[f"{at}self_attn.{x}_proj.weight"] @ normed
                    + tensors[f"{at}self_attn.{x}_proj.bias"]
                    for x in "qkv"
                ]
            )
        after = []
        for i, row in enumerate(rows):
            heads = []
            for head in range(config.n_heads):
                shared = head // group
                q = rotated(projected[i][0][head * dim : (head + 1) * dim], i)
                span = slice(shared * dim, (shared + 1) * dim)
                scores = torch.stack(
                    [q @ rotated(projected[j][1][span], j) / dim**0.5 for j in range(i + 1)]
                ).softmax(0)
                values = torch.stack([projected[j][2][span] for j in range(i + 1)])
                heads.append(scores @ values)
            row = row + tensors[f"{at}self_attn.o_proj.weight"] @ torch.cat(heads)
            normed = norm(row, tensors[f"{at}post_attention_layernorm.weight"])
            gate = tensors[f"{at}mlp.gate_proj.weight"] @ normed
            up = tensors[f"{at}mlp.up_proj.weight"] @ normed
            row = row + tensors[f"{at}mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
            after.append(row)
        rows = after
    return tensors["lm_head.weight"] @ norm(rows[-1], tensors["model.norm.weight"])


def test_a_folder_computes_what_its_weights_say(tmp_path: Path) -> None:
    config = ModelConfig(
        hidden=32, intermediate=48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, vocab=64
    )
    tensors = hf_folder(tmp_path, config)
    decoder = ModelSource(str(tmp_path)).decoder()
    tokens = some_tokens(9, vocab=64)
    logits, _ = decoder.plain_forward(torch.tensor(tokens))
    assert (logits[-1] - naive_last_logits(tensors, config, tokens)).abs().max() < 1e-4
    assert decoder.config.eos_tokens == (7, 8)


def test_a_folder_names_its_weights_by_their_bytes(tmp_path: Path) -> None:
    config = ModelConfig(
        hidden=16, intermediate=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, vocab=16
    )
    tensors = hf_folder(tmp_path, config)
    before = ModelSource(str(tmp_path)).weights_name()
    assert before == ModelSource(str(tmp_path)).weights_name()
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, str(tmp_path / "a.safetensors"))
    assert ModelSource(str(tmp_path)).weights_name() != before


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    config = ModelConfig(
        hidden=16, intermediate=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, vocab=16
    )
    hf_folder(tmp_path, config)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelRefusedError, match="lacks the tensor"):
        ModelSource(str(tmp_path)).decoder()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not served"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"use_sliding_window": True, "sliding_window": 10}, "sliding-window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"hidden_size": 10**9}, "out of bounds"),
        ({"num_key_value_heads": 3}, "cannot share"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(
    change: dict[str, object], message: str
) -> None:
    raw: dict[str, object] = {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
    assert config_from_mapping(raw, name="ok").head_dim == 8
    with pytest.raises(ModelRefusedError, match=message):
        config_from_mapping(raw | change, name="bad")


def test_a_folder_without_a_model_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ModelRefusedError, match="Hugging Face folder or `tiny`"):
        config_from_folder(tmp_path)


def test_scores_are_the_log_probabilities_of_the_tokens_that_follow() -> None:
    decoder = decoder_of(tiny())
    tokens = some_tokens(12)
    wanted = plain_logprobs(decoder, tokens)
    found = plain_scores(decoder, tokens, 5)
    assert found == pytest.approx([float(wanted[i - 1, tokens[i]]) for i in range(5, 12)])
    assert plain_scores(decoder, tokens, 12) == ()


def test_kv_memory_has_one_rank_s_heads() -> None:
    kv = paged_kv(tiny(), n_pages=3, page_tokens=PAGE, shard=Shard(rank=1, n_ranks=2), device=CPU)
    assert isinstance(kv, PagedKv)
    assert {tuple(tensor.shape) for layer in kv.layers for tensor in layer} == {(24, 1, 32)}
