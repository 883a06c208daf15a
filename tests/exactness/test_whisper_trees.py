"""Compares one pass of Whisper's decoder over a tree with one pass over each path."""

from typing import Any

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from mmdec.types import Draft, Needs, Scores, Verdict
from mmdec.whisper.target import WhisperTarget
from tests.support.tiny_whisper import TEXT, sound, whisper


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_tree_logits_equal_those_of_each_path(attention: str) -> None:
    """They are compared in float64, in a ragged batch with padding on the left, over three rounds with rows that
    leave."""
    network = whisper(80, 3).double()
    network.set_attn_implementation(attention)
    target = WhisperTarget(network)
    generator = torch.Generator().manual_seed(0)
    batch = 4
    states = network.model.encoder(sound(batch)["input_features"].double()).last_hidden_state
    ids = torch.randint(TEXT, (batch, 6), generator=generator)
    mask = (torch.arange(6) >= torch.tensor([0, 3, 1, 5])[:, None]).long()
    texts = [row[rows.bool()].tolist() for row, rows in zip(ids, mask, strict=True)]
    given: dict[str, Any] = {"input_ids": ids, "encoder_outputs": BaseModelOutput(last_hidden_state=states)}
    output = target.prefill({**given, "decoder_attention_mask": mask}, Needs((0, -1), True, True))
    session, context, draft, scores = output.session, output.context, output.draft, output.scores
    assert torch.equal(context.next_position, mask.sum(1))
    live = list(range(batch))

    def compare(draft: Draft, scores: Scores) -> list[list[list[int]]]:
        paths = []
        for place, row in enumerate(live):
            ways: list[list[int]] = []
            for node, parent in enumerate(draft.parents[place].tolist()):
                ways.append([*(ways[parent] if parent >= 0 else []), node])
                tokens = texts[row][:-1] + draft.tokens[place, ways[-1]].tolist()
                out = network(
                    encoder_outputs=(states[row : row + 1],),
                    decoder_input_ids=torch.tensor([tokens]),
                    output_hidden_states=True,
                )
                torch.testing.assert_close(scores.logits[place, node], out.logits[0, -1], rtol=1e-9, atol=1e-9)
                for layer, index in ((0, 1), (-1, -1)):
                    hidden = out.decoder_hidden_states[index][0, -1]
                    torch.testing.assert_close(scores.features[layer][place, node], hidden, rtol=1e-9, atol=1e-9)
            paths.append(ways)
        return paths

    compare(draft, scores)
    for step in range(3):
        size = 7
        parents = [[-1, *(int(torch.randint(node, (), generator=generator)) for node in range(1, size))] for _ in live]
        for text in (texts[row] for row in live):
            text.append(int(torch.randint(TEXT, (), generator=generator)))
        tokens = torch.randint(TEXT, (len(live), size), generator=generator)
        tokens[:, 0] = torch.tensor([texts[row][-1] for row in live])
        draft = Draft(tokens, torch.tensor(parents), torch.full((len(live),), size))
        scores = target.score(session, draft)
        ways = compare(draft, scores)
        chosen = [ways[place][(place + step) % size] for place in range(len(live))]
        longest = max(map(len, chosen))
        path = torch.tensor([way + [-1] * (longest - len(way)) for way in chosen])
        none = torch.zeros(len(live), dtype=torch.long)
        target.commit(session, Verdict(path, none, none.bool(), none[:, None], none))
        for place, row in enumerate(live):
            texts[row] += draft.tokens[place, chosen[place][1:]].tolist()
        if step == 1:
            rows = torch.tensor([3, 0, 1])
            target.select(session, rows)
            live = [live[place] for place in rows.tolist()]
