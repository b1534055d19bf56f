"""The paper in NumPy float64, with loops: one sentence, one head, one position at a time.

It knows the fields of ModelConfig and the names in the parameter tree, and nothing else of the package. It is
written to be compared with, so it follows the paper's formulas and never minds speed. There is no batch axis except
in `transformer` and `label_smoothed_loss`; there is no dropout.
"""

import math

import numpy as np


def _array(x):
    return np.asarray(x, dtype=np.float64)


# --- Section 3.2: attention --------------------------------------------------------------------------------------


def attention_weights(Q, K, mask):
    """softmax(Q K^T / sqrt(d_k)), `[t, s]`, over the keys whose mask is True; a row without such keys is all zeros."""
    Q, K = _array(Q), _array(K)
    (num_queries, d_k), num_keys = Q.shape, K.shape[0]
    weights = np.zeros((num_queries, num_keys))
    for i in range(num_queries):
        scores = {j: float(np.dot(Q[i], K[j])) / math.sqrt(d_k) for j in range(num_keys) if mask[i][j]}
        if not scores:
            continue
        highest = max(scores.values())
        total = sum(math.exp(score - highest) for score in scores.values())
        for j, score in scores.items():
            weights[i, j] = math.exp(score - highest) / total
    return weights


def attention(Q, K, V, mask):
    """Equation 1 for one head: Q `[t, d_k]`, K `[s, d_k]`, V `[s, d_v]`, mask `[t, s]` (True: may attend)."""
    weights, V = attention_weights(Q, K, mask), _array(V)
    output = np.zeros((weights.shape[0], V.shape[1]))
    for i in range(weights.shape[0]):
        for j in range(weights.shape[1]):
            output[i] += weights[i, j] * V[j]
    return output


def _project(x, params, head):
    """x W_i (+ b_i): one head's queries, keys or values."""
    projected = _array(x) @ _array(params["kernel"])[:, head, :]
    return projected + _array(params["bias"])[head] if "bias" in params else projected


def multi_head_attention(params, x, memory, mask):
    """Section 3.2.2 for one sentence: queries from x `[t, d_model]`, keys and values from memory `[s, d_model]`."""
    num_heads = params["query"]["kernel"].shape[1]
    heads = [
        attention(
            _project(x, params["query"], head),
            _project(memory, params["key"], head),
            _project(memory, params["value"], head),
            mask,
        )
        for head in range(num_heads)
    ]
    kernel = _array(params["output"]["kernel"])
    W_O = np.concatenate([kernel[head] for head in range(num_heads)], axis=0)  # [h d_v, d_model], as in the paper
    output = np.concatenate(heads, axis=1) @ W_O
    return output + _array(params["output"]["bias"]) if "bias" in params["output"] else output


# --- Section 3.3: the feed-forward network ------------------------------------------------------------------------


def activation(x, name):
    """relu, exact gelu or swish of one number."""
    if name == "relu":
        return max(0.0, x)
    if name == "gelu":
        return x * 0.5 * (1.0 + math.erf(x / math.sqrt(2.0)))
    if name == "swish":
        return x / (1.0 + math.exp(-x))
    raise ValueError(name)


def feed_forward(params, x, activation_name="relu"):
    """Equation 2: activation(x W_1 + b_1) W_2 + b_2 at each position."""
    outputs = []
    for position in _array(x):
        inner = position @ _array(params["inner"]["kernel"]) + _array(params["inner"]["bias"])
        inner = np.array([activation(value, activation_name) for value in inner])
        outputs.append(inner @ _array(params["outer"]["kernel"]) + _array(params["outer"]["bias"]))
    return np.stack(outputs)


def layer_norm(params, x, epsilon=1e-6, variant="standard"):
    """Layer normalization of each position, standard or with the unbiased standard deviation."""
    outputs = []
    for position in _array(x):
        n = len(position)
        mean = sum(position) / n
        squares = sum((value - mean) ** 2 for value in position)
        if variant == "standard":
            divisor = math.sqrt(squares / n + epsilon)
        elif variant == "unbiased_std":
            divisor = math.sqrt(squares / (n - 1)) + epsilon
        else:
            raise ValueError(variant)
        outputs.append((position - mean) / divisor * _array(params["scale"]) + _array(params["bias"]))
    return np.stack(outputs)


# --- Sections 3.4 and 3.5: embeddings and positions ---------------------------------------------------------------


def positional_encoding(length, d_model, layout="interleaved", exponent="paper", offset=0):
    """PE, `[length, d_model]`: pair i is the sine and cosine of position / wavelength_i."""
    table = np.zeros((length, d_model))
    pairs = d_model // 2
    for row in range(length):
        position = row + offset
        for i in range(pairs):
            power = {"paper": lambda i: 2 * i / d_model, "tensor2tensor": lambda i: i / (pairs - 1)}[exponent](i)
            angle = position / 10000.0**power
            sine, cosine = {"interleaved": (2 * i, 2 * i + 1), "halves": (i, pairs + i)}[layout]
            table[row, sine] = math.sin(angle)
            table[row, cosine] = math.cos(angle)
    return table


def _table(params, config, side):
    return _array(params["embedding" if config.tie_embeddings == "all" else f"{side}_embedding"]["table"])


def embed(params, config, ids, side):
    """Embeddings plus positions of one sentence; `side` is "source" or "target"."""
    table = _table(params, config, side)
    rows = []
    for position, token in enumerate(ids):
        row = table[token] * (math.sqrt(config.d_model) if config.scale_embeddings else 1.0)
        if side == "target" and config.decoder_start == "zeros" and position == 0:
            row = np.zeros(config.d_model)
        rows.append(row)
    x = np.stack(rows)
    if config.positions == "learned":
        positions = _array(params[f"{side}_positions"]["table"])
        return x + np.stack([positions[config.position_offset + position] for position in range(len(ids))])
    return x + positional_encoding(
        len(ids), config.d_model, config.positions, config.position_exponent, config.position_offset
    )


# --- Section 3.1: the stacks --------------------------------------------------------------------------------------


def source_mask(config, src):
    """`[s]`: which source positions may be attended to: all but padding."""
    return np.array([token != config.pad_id for token in src])


def target_mask(config, tgt_in):
    """`[t, t]`: positions up to one's own, without padding. The start token is no padding, even if it has that id."""
    length = len(tgt_in)
    mask = np.zeros((length, length), dtype=bool)
    for query in range(length):
        for key in range(query + 1):
            mask[query, key] = key == 0 or tgt_in[key] != config.pad_id
    return mask


def _norm(params, config, x):
    return layer_norm(params, x, config.norm_epsilon, config.norm_variant)


def _sub_layer(params, config, name, x, function):
    """LayerNorm(x + Sublayer(x)), or x + Sublayer(LayerNorm(x))."""
    norm = params[f"{name}_norm"]
    if config.norm_position == "post":
        return _norm(norm, config, x + function(params[name], x))
    return x + function(params[name], _norm(norm, config, x))


def encoder(params, config, x, mask):
    """The encoder's stack on embedded `x` `[s, d_model]`; `mask` `[s]` is True where there is no padding."""
    mask = np.stack([mask for _ in range(len(x))])
    for i in range(config.encoder.num_layers):
        layer = params[f"layer_{i}"]
        x = _sub_layer(layer, config, "self_attention", x, lambda p, y: multi_head_attention(p, y, y, mask))
        x = _sub_layer(layer, config, "feed_forward", x, lambda p, y: feed_forward(p, y, config.activation))
    return _norm(params["final_norm"], config, x) if config.final_norm else x


def decoder(params, config, x, memory, src_mask, tgt_mask):
    """The decoder's stack on embedded `x` `[t, d_model]`; `src_mask` is `[s]`, `tgt_mask` `[t, t]`."""
    cross_mask = np.stack([src_mask for _ in range(len(x))])
    for i in range(config.decoder.num_layers):
        layer = params[f"layer_{i}"]
        x = _sub_layer(layer, config, "self_attention", x, lambda p, y: multi_head_attention(p, y, y, tgt_mask))
        x = _sub_layer(layer, config, "cross_attention", x, lambda p, y: multi_head_attention(p, y, memory, cross_mask))
        x = _sub_layer(layer, config, "feed_forward", x, lambda p, y: feed_forward(p, y, config.activation))
    return _norm(params["final_norm"], config, x) if config.final_norm else x


def logits(params, config, x):
    """Return `[t, v]`: the product with the target embeddings, or with a separate matrix if nothing is tied."""
    if config.tie_embeddings == "none":
        scores = x @ _array(params["output_projection"]["kernel"])
    else:
        scores = x @ _table(params, config, "target").T
    return scores + _array(params["logits_bias"]) if config.logits_bias else scores


def transformer(params, config, src, tgt_in):
    """Return the logits `[b, t, v]` of the complete model without dropout for ids `[b, s]` and `[b, t]`."""
    results = []
    for src_row, tgt_row in zip(np.asarray(src), np.asarray(tgt_in), strict=True):
        src_mask = source_mask(config, src_row)
        memory = encoder(params["encoder"], config, embed(params, config, src_row, "source"), src_mask)
        x = embed(params, config, tgt_row, "target")
        x = decoder(params["decoder"], config, x, memory, src_mask, target_mask(config, tgt_row))
        results.append(logits(params, config, x))
    return np.stack(results)


# --- Section 5: training ------------------------------------------------------------------------------------------


def smoothed_target(target, vocab_size, pad_id, smoothing=0.1, mass="non_target"):
    """Return the smoothed distribution `[v]` of the correct token `target`."""
    q = np.zeros(vocab_size)
    for token in range(vocab_size):
        if mass == "all":
            q[token] = smoothing / vocab_size + (1 - smoothing if token == target else 0)
        elif token == target:
            q[token] = 1 - smoothing
        elif mass == "non_target":
            q[token] = smoothing / (vocab_size - 1)
        elif mass == "non_target_non_pad":
            q[token] = 0 if token == pad_id else smoothing / (vocab_size - 2)
        else:
            raise ValueError(mass)
    return q


def label_smoothed_loss(logits, targets, pad_id, smoothing=0.1, mass="non_target"):
    """(sum of the cross-entropies, number of tokens) over logits `[b, t, v]`, leaving out targets that are padding."""
    logits, targets = _array(logits), np.asarray(targets)
    vocab_size, loss_sum, num_tokens = logits.shape[-1], 0.0, 0
    for scores, target in zip(logits.reshape(-1, vocab_size), targets.reshape(-1), strict=True):
        if target == pad_id:
            continue
        log_total = max(scores) + math.log(sum(math.exp(score - max(scores)) for score in scores))
        q = smoothed_target(target, vocab_size, pad_id, smoothing, mass)
        loss_sum += sum(q[token] * (log_total - scores[token]) for token in range(vocab_size))
        num_tokens += 1
    return loss_sum, num_tokens


def noam_rate(step, d_model, warmup_steps=4000, scale=1.0):
    """Equation 3; the first step is step 1."""
    return scale * d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def adam_step(param, grad, m, v, step, learning_rate, beta1=0.9, beta2=0.98, epsilon=1e-9):
    """One update of Adam (section 5.3): (param, m, v) after it; `step` is 1 at the first update."""
    param, grad = _array(param), _array(grad)
    m = beta1 * _array(m) + (1 - beta1) * grad
    v = beta2 * _array(v) + (1 - beta2) * grad**2
    m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
    return param - learning_rate * m_hat / (np.sqrt(v_hat) + epsilon), m, v
