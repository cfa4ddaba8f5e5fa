"""The forward pass against torch's own transformer layers, padded batches included."""

from __future__ import annotations

import numpy as np

from heterolab.models import minilm, weights
from heterolab.models.weights import DIM, FFN, HEADS, LAYERS


def torch_forward(torch, stored, ids):
    """BERT from ``torch.nn.TransformerEncoderLayer``: norm after each part, exact GELU."""

    def get(name):
        return torch.from_numpy(np.array(stored[name]))

    nn = torch.nn.functional
    tokens = torch.from_numpy(ids)
    x = get("embeddings.word_embeddings.weight")[tokens]
    x = x + get("embeddings.position_embeddings.weight")[: ids.shape[1]]
    x = x + get("embeddings.token_type_embeddings.weight")[0]
    x = nn.layer_norm(
        x, (DIM,), get("embeddings.LayerNorm.weight"), get("embeddings.LayerNorm.bias"), eps=1e-12
    )
    for number in range(LAYERS):
        name = f"encoder.layer.{number}"
        layer = torch.nn.TransformerEncoderLayer(
            DIM, HEADS, FFN, dropout=0, activation="gelu", layer_norm_eps=1e-12, batch_first=True
        )
        attention = f"{name}.attention"
        own = {
            "self_attn.out_proj": f"{attention}.output.dense",
            "norm1": f"{attention}.output.LayerNorm",
            "linear1": f"{name}.intermediate.dense",
            "linear2": f"{name}.output.dense",
            "norm2": f"{name}.output.LayerNorm",
        }
        state = {f"{o}.{p}": get(f"{theirs}.{p}") for o, theirs in own.items() for p in ("weight", "bias")}
        for p in ("weight", "bias"):
            parts = [get(f"{attention}.self.{part}.{p}") for part in ("query", "key", "value")]
            state[f"self_attn.in_proj_{p}"] = torch.cat(parts)
        layer.load_state_dict(state)
        x = layer.train()(x, src_key_padding_mask=tokens == 0)  # train: the slow, plain path
    return x.detach().numpy()


def test_equals_torch_on_a_padded_batch(need) -> None:
    need("torch")
    import torch

    stored = weights.random_arrays()
    rng = np.random.default_rng(0)
    ids = rng.integers(1000, 30_000, (3, 24)).astype(np.int32)
    ids[1, 10:] = ids[2, 1:] = 0
    hidden, lengths = minilm.forward(np, minilm.arrange(stored), ids)
    expected = torch_forward(torch, stored, ids)
    assert lengths.tolist() == [24, 10, 1]
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(
            hidden[row, :length], expected[row, :length], atol=1e-4 * np.abs(expected).max()
        )
