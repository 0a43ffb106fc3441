"""What a step writes into the persistent buffers, and that padding is harmless."""

from __future__ import annotations

import numpy as np
import torch

from minivllm.worker.input_buffers import BatchRows, InputBuffers


def make_rows(query_lens: list[int], num_computed: list[int], tables: list[list[int]]) -> BatchRows:
    lens, computed = np.array(query_lens), np.array(num_computed)
    positions = np.concatenate([c + np.arange(n) for c, n in zip(computed, lens, strict=True)])
    table = np.zeros((len(tables), 4), np.int32)
    for row, blocks in zip(table, tables, strict=True):
        row[: len(blocks)] = blocks
    request_of = np.repeat(np.arange(len(lens)), lens)
    return BatchRows(100 + positions, positions, request_of, lens, computed, table)


def make_buffers() -> InputBuffers:
    return InputBuffers(32, 8, max_model_len=16, block_size=4, device=torch.device("cpu"))


def test_a_step_is_laid_out_flat_with_its_slots_and_lengths() -> None:
    rows = make_rows([1, 3], [5, 2], [[7, 3], [2, 9]])
    inputs = make_buffers().fill(rows)
    metadata = inputs.attn_metadata
    assert inputs.positions.tolist() == [5, 2, 3, 4]
    assert inputs.input_ids.tolist() == [105, 102, 103, 104]
    assert metadata.slot_mapping.tolist() == [3 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3, 9 * 4]
    assert metadata.query_start_loc.tolist() == [0, 1, 4]
    assert metadata.seq_lens.tolist() == [6, 5]
    assert metadata.num_decodes == 1
    assert (metadata.max_query_len, metadata.max_seq_len) == (3, 6)


def test_padding_points_nowhere_even_where_a_real_request_was_a_step_before() -> None:
    buffers = make_buffers()
    buffers.fill(make_rows([4, 4, 4], [0, 4, 8], [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]))
    metadata = buffers.fill(make_rows([1], [6], [[3, 5]]), 8, 4).attn_metadata
    assert metadata.slot_mapping.tolist() == [5 * 4 + 2] + [-1] * 7
    assert metadata.seq_lens.tolist() == [7, 0, 0, 0]
    assert metadata.query_start_loc.tolist() == [0, 1, 1, 1, 1]
    assert metadata.block_table[1:].eq(0).all()
    assert metadata.num_actual_tokens == 1
    assert metadata.num_reqs == 4


def test_every_step_hands_out_the_same_addresses() -> None:
    buffers = make_buffers()
    addresses = []
    for query_lens in ([1], [3, 2], [4, 4, 4]):
        tables = [[1, 2, 3]] * len(query_lens)
        inputs = buffers.fill(make_rows(query_lens, [0] * len(query_lens), tables))
        metadata = inputs.attn_metadata
        tensors = (
            inputs.input_ids,
            inputs.positions,
            metadata.slot_mapping,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
        )
        addresses.append([tensor.data_ptr() for tensor in tensors])
    assert addresses[0] == addresses[1] == addresses[2]
