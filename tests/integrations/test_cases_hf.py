"""Cases that users of other attention libraries met in Transformers, by their number."""

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, GPT2Config, GptOssConfig

from tests.integrations.hf_models import Trio, llama_config, tokens
from tests.integrations.test_llama import in_steps
from tilewise.core.tolerance import assert_within_budget

GPT2 = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, pad_token_id=0)
SINKS = GptOssConfig(
    **llama_config(num_local_experts=2, num_experts_per_tok=1, head_dim=16).to_diff_dict()
)


@pytest.fixture(scope="module")
def llama() -> Trio:
    return Trio.random(llama_config())


def left_padded(lengths: list[int], S: int) -> Tensor:
    return (torch.arange(S) >= S - torch.tensor(lengths)[:, None]).long()


def check_rows(trio: Trio, ids: Tensor, mask: Tensor) -> None:
    """Real tokens of every row against its unpadded run."""
    with torch.no_grad():
        got, eager = (model(ids, attention_mask=mask).logits for model in trio.all[:2])
        for row, seen in enumerate(mask.bool()):
            exact = trio.exact(ids[row : row + 1, seen]).logits[0]
            assert_within_budget(got[row, seen], exact, eager[row, seen])


def test_c249_left_padded_batch(llama: Trio) -> None:
    """Left-padded rows of different lengths; each row generates what it does alone."""
    lengths = [11, 4, 1]
    mask = left_padded(lengths, 11)
    ids = tokens(3, 11) * mask
    check_rows(llama, ids, mask)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    together = llama.got.generate(ids, attention_mask=mask, **options)
    for row, length in enumerate(lengths):
        prompt = ids[row : row + 1, 11 - length :]
        alone = llama.got.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert torch.equal(together[row, 11:], alone[0, length:])


def test_c251_position_ids_of_three_axes_are_not_packing() -> None:
    """position_ids (3, 1, 256) beside 256 tokens; ends at 768 do not fit them."""
    tile = AttentionInterface()["tilewise"]
    layer = torch.nn.Module()
    qkv = [torch.randn(1, heads, 256, 16) for heads in (4, 2, 2)]
    expected = tile(layer, *qkv, None)[0]
    for positions in (torch.arange(256).expand(3, 1, 256), torch.arange(256)):
        assert torch.equal(tile(layer, *qkv, None, position_ids=positions)[0], expected)
    cu = torch.tensor([0, 256, 512, 768])
    with pytest.raises(ValueError, match="cu_seq"):
        tile(layer, *qkv, None, cu_seq_lens_q=cu, cu_seq_lens_k=cu)


def test_c252_several_new_tokens_with_a_filled_cache(llama: Trio) -> None:
    """Assisted decoding: rising positions are one sequence, not packed ones."""
    ids = tokens(1, 12)
    with torch.no_grad():
        got = in_steps(llama.got, ids, None, [5, 9], DynamicCache(config=llama.got.config))
        assert_within_budget(got, llama.exact(ids).logits, llama.eager(ids).logits)
    prompt = tokens(1, 4).repeat(1, 3)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    plain = llama.got.generate(prompt, **options)
    assisted = llama.got.generate(prompt, **options, prompt_lookup_num_tokens=3)
    assert torch.equal(plain, assisted)


def test_c254_padding_leaves_gpt2_causal() -> None:
    trio = Trio.random(GPT2)
    mask = left_padded([9, 5], 9)
    ids = tokens(2, 9) * mask
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    got, eager = (m.generate(ids, attention_mask=mask, **options) for m in trio.all[:2])
    assert torch.equal(got, eager)
    later = ids.clone()
    later[:, -1] = 50
    with torch.no_grad():
        first, second = (trio.got(x, attention_mask=mask).logits for x in (ids, later))
    assert torch.equal(first[:, :-1], second[:, :-1])
    assert not torch.equal(first[:, -1], second[:, -1])


def test_c256_prompt_padded_left_and_completion_right(llama: Trio) -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]])
    check_rows(llama, tokens(3, 7) * mask, mask)


def test_c257_left_padded_cached_decode(llama: Trio) -> None:
    """ABC behind two pads, and QWERT: one new token each sees its own real keys only."""
    mask = left_padded([3, 5], 5)
    ids, new = tokens(2, 5) * mask, tokens(2, 1)
    everything = torch.cat([ids, new], dim=1)
    grown = torch.cat([mask, torch.ones(2, 1).long()], dim=1)
    with torch.no_grad():
        cache = DynamicCache(config=llama.got.config)
        got = in_steps(llama.got, everything, grown, [5], cache)[:, -1]
        eager = llama.eager(everything, attention_mask=grown).logits[:, -1]
        for row in range(2):
            alone = everything[row : row + 1, grown[row].bool()]
            exact = llama.exact(alone).logits[0, -1]
            assert_within_budget(got[row], exact, eager[row])


def test_c258_sinks_on_the_cpu() -> None:
    """Elsewhere refused on a CPU: here sinks count, and have gradients."""
    trio = Trio.random(SINKS)
    with torch.no_grad():
        for models in zip(*(model.model.layers for model in trio.all), strict=True):
            for layer in models:
                layer.self_attn.sinks.copy_(torch.tensor([-1.0, 0.0, 1.0, 3.0]))
    mask = left_padded([9, 5], 9)
    inputs = {"input_ids": tokens(2, 9) * mask, "attention_mask": mask}
    trio.check(lambda out: out.logits[mask.bool()], **inputs)
    trio.check_gradients(lambda out: out.logits[mask.bool()].square().sum(), **inputs)
    gradient = trio.got.model.layers[0].self_attn.sinks.grad
    assert gradient is not None and bool((gradient != 0).all())
