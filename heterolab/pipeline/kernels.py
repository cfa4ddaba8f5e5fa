"""Stage 4, on the device: the kernels of a batch, and those of our own.

Each kernel of our own here is a pair. The NumPy function is the *reference*: it says what is computed, in
a few lines, and every device must match it. The CUDA source says how thousands of threads
share that work. The pattern of all of them: work out which element is mine from
``blockIdx``, ``blockDim`` and ``threadIdx``, check that it exists, compute it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from heterolab.device.base import Array, Buffer, CudaSource, Kernel, Work
from heterolab.errors import InputError

if TYPE_CHECKING:
    from heterolab.models.encoder import EncoderKernels
    from heterolab.pipeline.batch import Batch
    from heterolab.pipeline.payload import Payload, Returns
    from heterolab.pipeline.transfer import Slot


def run_kernels(
    slot: Slot, kernels: EncoderKernels, payload: Payload, returns: Returns, batch: Batch
) -> tuple[Buffer, tuple[int, ...]]:
    """Enqueue a batch's kernels: forward pass, pooling, and what makes the result of the vectors.

    Returns
    -------
    The buffer that holds the result, and the shape of the part of it that is this batch's.
    """
    n, positions = len(batch), payload.positions(batch.length)
    padded = slot.device_in.view(n, *payload.row(batch.length))
    hidden = slot.hidden.view(n, positions, slot.vectors.shape[0] // slot.lengths.shape[0])
    lengths, vectors = slot.lengths.view(n), slot.vectors.view(n, hidden.shape[2])
    launch = slot.stream.launch
    launch(payload.kernel(kernels), [padded], [hidden, lengths], batch=batch.number)
    launch(kernels.pool, [hidden, lengths], [vectors], batch=batch.number)
    if returns.kernel is None:
        return slot.vectors, vectors.shape
    shape = (n, *returns.row)
    launch(returns.kernel(kernels), [vectors], [slot.result.view(*shape)], batch=batch.number)
    return slot.result, shape


#: Threads of a block. The block reductions below need a power of two.
THREADS = 128
#: Top-k's: the most a block can have. A thread that looks at one row of the knowledge base waits
#: for memory 24 times; with 128 threads it was six rows, one after the other, and six times as long.
TOP_K_THREADS = 1024
MAX_K = 8


def _blocks(n: int, threads: int) -> int:
    """Blocks of `threads` that cover `n` elements; a launch has at least one."""
    return max(1, -(-n // threads))


def _size(buffer: Buffer) -> int:
    return prod(buffer.shape)


# -- one thread an element ------------------------------------------------------------------

VECTOR_ADD = r"""
extern "C" __global__
void vector_add(const float* a, const float* b, float* c, long long n)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;   // my element
    if (i < n)                                // the last block may have threads to spare
        c[i] = a[i] + b[i];
}
"""


def vector_add() -> Kernel:
    """``c = a + b``: reads two float32 buffers, writes a third of the same size."""

    def run(xp: Any, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        xp.add(reads[0], reads[1], out=writes[0])

    def work(reads: Sequence[Buffer], writes: Sequence[Buffer]) -> Work:
        n = _size(writes[0])
        return Work(flops=n, bytes=12 * n, blocks=_blocks(n, 256), threads=256, size=n)

    cuda = CudaSource(
        VECTOR_ADD,
        "vector_add",
        arguments=lambda reads, writes: (*reads, *writes, np.int64(writes[0].size)),
        grid=lambda reads, writes: (_blocks(writes[0].size, 256), 256),
    )
    return Kernel("vector_add", run, work, cuda)


ROUNDS = r"""
extern "C" __global__
void rounds(const unsigned int* x, unsigned int* y,
            unsigned int a, unsigned int c, int k, long long n)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        unsigned int value = x[i];
        for (int round = 0; round < k; ++round)
            value = a * value + c;            // each needs the one before: no shortcut here
        y[i] = value;
    }
}
"""

#: The random-number step of Numerical Recipes: x -> A·x + C modulo 2**32.
ROUND_A, ROUND_C = 1664525, 1013904223


def rounds(k: int) -> Kernel:
    """`k` rounds of ``x = a·x + c`` (modulo 2³²) on every uint32: work per byte, by a knob.

    The GPU does the `k` rounds one after the other. The reference jumps ahead: k rounds of a
    linear step are one linear step, with a and c of its own. The results are equal, bit by bit.

    Raises
    ------
    InputError
        `k` is not a whole number from 0 to a million.
    """
    if not isinstance(k, int) or isinstance(k, bool) or not 0 <= k <= 1_000_000:
        raise InputError(f"rounds(k={k!r}): the number of rounds is a whole number, 0 to 1,000,000.")
    a, c = _jump(k)

    def run(xp: Any, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        xp.multiply(reads[0], xp.uint32(a), out=writes[0])
        xp.add(writes[0], xp.uint32(c), out=writes[0])

    def work(reads: Sequence[Buffer], writes: Sequence[Buffer]) -> Work:
        n = _size(writes[0])
        blocks = _blocks(n, 256)
        return Work(flops=2 * n * k, bytes=8 * n, dtype="int32", blocks=blocks, threads=256, size=n * k)

    constants = (np.uint32(ROUND_A), np.uint32(ROUND_C), np.int32(k))
    cuda = CudaSource(
        ROUNDS,
        "rounds",
        arguments=lambda reads, writes: (*reads, *writes, *constants, np.int64(writes[0].size)),
        grid=lambda reads, writes: (_blocks(writes[0].size, 256), 256),
    )
    return Kernel("rounds", run, work, cuda)


def _jump(k: int) -> tuple[int, int]:
    """The step ``x -> a·x + c`` that does `k` rounds at once, by repeated squaring."""
    a, c = 1, 0  # no round at all
    step_a, step_c = ROUND_A, ROUND_C  # 1, 2, 4, 8 … rounds
    while k:
        if k & 1:
            a, c = step_a * a % 2**32, (step_a * c + step_c) % 2**32
        step_a, step_c = step_a * step_a % 2**32, (step_a * step_c + step_c) % 2**32
        k >>= 1
    return a, c


EMPTY = r"""
extern "C" __global__
void empty() { }
"""


def empty() -> Kernel:
    """Does nothing: what is left is the price of a launch."""

    def run(xp: Any, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        return None

    cuda = CudaSource(EMPTY, "empty", arguments=lambda reads, writes: (), grid=lambda reads, writes: (1, 32))
    return Kernel("empty", run, lambda reads, writes: Work(blocks=1, threads=32), cuda)


# -- one block a text: mean-pool and normalise ----------------------------------------------

POOL = r"""
// One block a text: the mean over its tokens, then scaled to length 1.
extern "C" __global__
void mean_pool(const float* hidden,     // (batch, tokens, dim)
               const int* lengths,      // (batch): tokens that are not padding
               float* vectors,          // (batch, dim)
               int batch, int tokens, int dim)
{
    __shared__ float partial[128];      // one number a thread
    int row = blockIdx.x;
    if (row >= batch) return;           // the whole block leaves together

    int length = min(max(lengths[row], 0), tokens);
    const float* text = hidden + (size_t)row * tokens * dim;
    float* vector = vectors + (size_t)row * dim;

    // Neighbouring threads read neighbouring numbers: one wide memory access for 32 of them.
    float squares = 0.0f;
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        float sum = 0.0f;
        #pragma unroll 8                // 8 loads under way at once
        for (int t = 0; t < length; ++t)
            sum += text[(size_t)t * dim + d];
        float mean = sum / max(length, 1);
        vector[d] = mean;
        squares += mean * mean;
    }

    // Add up the threads' squares in shared memory: 128 numbers, 64, 32 … 1.
    partial[threadIdx.x] = squares;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half)
            partial[threadIdx.x] += partial[threadIdx.x + half];
        __syncthreads();                // nobody reads before everybody has written
    }

    float norm = fmaxf(sqrtf(partial[0]), 1e-12f);
    for (int d = threadIdx.x; d < dim; d += blockDim.x)
        vector[d] /= norm;              // my own numbers: written by this same thread above
}
"""


def pool_reference(xp: Any, reads: Sequence[Array], writes: Sequence[Array]) -> None:
    """Mean of each text's token vectors, scaled to length 1 (a text of no tokens gives 0)."""
    hidden, lengths = reads
    real = xp.arange(hidden.shape[1]) < lengths[:, None]
    total = xp.where(real[:, :, None], hidden, xp.float32(0)).sum(axis=1)
    mean = total / xp.maximum(lengths, 1)[:, None].astype(xp.float32)
    norm = xp.sqrt((mean * mean).sum(axis=1, keepdims=True))
    writes[0][...] = mean / xp.maximum(norm, xp.float32(1e-12))


def pool() -> Kernel:
    """Reads hidden float32 (B, L, D) and lengths int32 (B,); writes vectors float32 (B, D)."""

    def work(reads: Sequence[Buffer], writes: Sequence[Buffer]) -> Work:
        batch, tokens, dim = reads[0].shape
        read, written = batch * tokens * dim, batch * dim
        return Work(
            flops=read + 4 * written,
            bytes=4 * (read + batch + written),
            blocks=max(batch, 1),
            threads=THREADS,
            size=batch * tokens,
        )

    cuda = CudaSource(
        POOL,
        "mean_pool",
        arguments=lambda reads, writes: (*reads, *writes, *(np.int32(n) for n in reads[0].shape)),
        grid=lambda reads, writes: (max(reads[0].shape[0], 1), THREADS),
    )
    return Kernel("encoder.pool", pool_reference, work, cuda)


# -- one block a text: the k most similar rows ------------------------------------------------

TOP_K = r"""
#define MAX_K 8
#define LOWEST -3.402823466e+38f

// Higher score first; of equal scores the lower row.
__device__ bool better(float score, int row, float other_score, int other_row)
{
    return score > other_score || (score == other_score && row < other_row);
}

// One block a text. Each thread keeps the k best of the rows it looked at; then the block
// picks the best of all threads' best, k times.
extern "C" __global__ __launch_bounds__(1024)  // registers for 1,024 threads
void top_k(const float* vectors,        // (batch, dim), length 1
           const float* known,          // (dim, n): column r is row r of the knowledge base
           float* result,               // (batch, 2, k): row numbers, then scores
           int batch, int dim, int n, int k)
{
    extern __shared__ float vector[];   // dim floats: this text's vector
    __shared__ float scores[1024];
    __shared__ int rows[1024];
    int text = blockIdx.x;
    if (text >= batch) return;
    int me = threadIdx.x;

    for (int d = me; d < dim; d += blockDim.x)
        vector[d] = vectors[(size_t)text * dim + d];
    __syncthreads();

    float my_scores[MAX_K];
    int my_rows[MAX_K];
    for (int i = 0; i < MAX_K; ++i) { my_scores[i] = LOWEST; my_rows[i] = n; }

    for (int r = me; r < n; r += blockDim.x) {
        float score = 0.0f;
        #pragma unroll 16               // 16 loads under way at once: one by one, each waits
        for (int d = 0; d < dim; ++d)   // neighbouring threads read neighbouring rows' numbers
            score += vector[d] * known[(size_t)d * n + r];
        int row = r;
        for (int i = 0; i < k; ++i)     // insert, and push the rest one place down
            if (better(score, row, my_scores[i], my_rows[i])) {
                float s = my_scores[i]; my_scores[i] = score; score = s;
                int q = my_rows[i];     my_rows[i] = row;     row = q;
            }
    }

    int next = 0;                       // my best row that is not taken yet
    for (int place = 0; place < k; ++place) {
        scores[me] = next < k ? my_scores[next] : LOWEST;
        rows[me] = next < k ? my_rows[next] : n;
        __syncthreads();
        for (int half = blockDim.x / 2; half > 0; half /= 2) {
            if (me < half && better(scores[me + half], rows[me + half], scores[me], rows[me])) {
                scores[me] = scores[me + half];
                rows[me] = rows[me + half];
            }
            __syncthreads();
        }
        if (next < k && my_rows[next] == rows[0])
            ++next;                     // it was mine
        if (me == 0) {
            result[((size_t)text * 2 + 0) * k + place] = (float)rows[0];
            result[((size_t)text * 2 + 1) * k + place] = scores[0];
        }
        __syncthreads();                // rows[0] has been read by all: the next round may begin
    }
}
"""


def top_k(known: Array, k: int) -> Kernel:
    """The `k` rows most similar to each vector, best first; of equal ones the lower row first.

    Parameters
    ----------
    known
        float32 (D, n) on the device: column r is row r of the knowledge base, scaled to length
        1, so that a dot product is a cosine. Transposed, so that neighbouring threads, which
        look at neighbouring rows, read neighbouring numbers.
    k
        1 to 8, and at most n.

    Reads vectors float32 (B, D); writes result float32 (B, 2, k): row numbers, then scores.
    """
    dim, n = known.shape
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= min(MAX_K, n):
        raise InputError(f"top_k(k={k!r}): give a whole number, 1 to {min(MAX_K, n)} ({n} rows are known).")

    def run(xp: Any, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        scores = reads[0] @ known
        best = xp.argsort(-scores, axis=1, kind="stable")[:, :k]
        writes[0][:, 0] = best
        writes[0][:, 1] = xp.take_along_axis(scores, best, axis=1)

    def work(reads: Sequence[Buffer], writes: Sequence[Buffer]) -> Work:
        batch = reads[0].shape[0]
        return Work(
            flops=2 * batch * n * dim,
            bytes=4 * (batch * (n + 1) * dim + 2 * batch * k),
            blocks=max(batch, 1),
            threads=TOP_K_THREADS,
            size=batch,
        )

    def arguments(reads: Sequence[Array], writes: Sequence[Array]) -> tuple[Any, ...]:
        return (reads[0], known, writes[0], *map(np.int32, (reads[0].shape[0], dim, n, k)))

    cuda = CudaSource(
        TOP_K,
        "top_k",
        arguments=arguments,
        grid=lambda reads, writes: (max(reads[0].shape[0], 1), TOP_K_THREADS),
        shared_bytes=lambda reads, writes: 4 * dim,
    )
    return Kernel("encoder.top_k", run, work, cuda)


def logits(table: Array, rows: Array) -> Kernel:
    """``vectors @ table``: the library's matrix product, and a result as large as a vocabulary.

    Parameters
    ----------
    table
        float32 (D, V) on the device. Its first columns are `rows`, the others are 0.
    rows
        float32 (n, D), a NumPy array.

    Reads vectors float32 (B, D); writes float32 (B, V).
    """
    dim, columns = table.shape

    def run(xp: Any, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        xp.matmul(reads[0], table, out=writes[0])

    def recall(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        writes[0][:, : len(rows)] = reads[0] @ rows.T
        writes[0][:, len(rows) :] = 0

    def work(reads: Sequence[Buffer], writes: Sequence[Buffer]) -> Work:
        batch = reads[0].shape[0]
        moved = 4 * (dim * columns + batch * (dim + columns))
        return Work(flops=2 * batch * dim * columns, bytes=moved, size=batch)

    return Kernel("encoder.logits", run, work, recall=recall)


#: Every CUDA source of the course, by entry point: what a test compiles.
SOURCES: dict[str, str] = {
    "vector_add": VECTOR_ADD,
    "rounds": ROUNDS,
    "empty": EMPTY,
    "mean_pool": POOL,
    "top_k": TOP_K,
}
