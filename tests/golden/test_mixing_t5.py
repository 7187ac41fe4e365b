"""CR-ILD's form for T5, against transformers' own T5 run on mixed embeddings; scores rebuilt from its projections."""

import copy

import torch

from limbeck.data.mixing import Mixup
from limbeck.distiller import Distiller
from limbeck.objectives import build
from limbeck.recipe import resolve
from tests.golden.test_mixing import kl
from tests.test_golden import close, doubled
from tests.tiny import tiny_pair, tiny_texts

RECIPES = {"cr-ild:t5"}
STEPS, STEP = 40, 30


class Own:
    """What a T5 makes of embeddings: maps and scores of its decoder's last self-attention."""

    def __init__(self, model, change, source, written, batch):
        eager = copy.deepcopy(model)
        eager.set_attn_implementation("eager")
        attention, caught = eager.decoder.block[-1].layer[0].SelfAttention, {}
        for name in ("q", "k"):
            getattr(attention, name).register_forward_hook(lambda _, __, out, name=name: caught.update({name: out}))
        shifted = eager.prepare_decoder_input_ids_from_labels(batch["labels"])
        with torch.no_grad():
            out = eager(
                inputs_embeds=change(eager.shared(batch["input_ids"])), attention_mask=source.long(),
                decoder_inputs_embeds=change(eager.shared(shifted)), decoder_attention_mask=written.long(),
                output_attentions=True,
            )  # fmt: skip
            q, k = (caught[name].unflatten(-1, (attention.n_heads, -1)).transpose(1, 2) for name in ("q", "k"))
            size = written.shape[1]
            first = eager.decoder.block[0].layer[0].SelfAttention
            self.scores = q @ k.transpose(-1, -2) + first.compute_bias(size, size, device=q.device)
        self.maps = out.decoder_attentions[-1]
        seen = written[:, None, None, :] & torch.ones(size, size, dtype=torch.bool).tril()
        torch.testing.assert_close(self.scores.masked_fill(~seen, -torch.inf).softmax(-1)[0, :, 0], self.maps[0, :, 0])


def test_cr_ild_for_t5():
    """MSE of the decoder's last scores on mixed inputs, and the student's maps there against the mix of its own."""
    recipe = resolve("cr-ild:t5")
    stage, labels = recipe.stages
    assert list(labels.objectives) == ["labels"]
    teacher, student = (tiny_pair("t5", n, n, seed=n).double() for n in (4, 2))
    with doubled():
        mixup = Mixup(stage.mixup, rows=8)
        terms = {name: build(o) for name, o in stage.objectives.items()}
        distiller = Distiller(teacher, student, terms, mixup=mixup, steps=STEPS, seed=5).eval()
    distiller.at(3, STEP)
    batch = tiny_texts()
    share, partner = mixup.share, mixup(batch)["partner"].tolist()
    assert partner != [0, 1, 2]
    source, written = (batch[name].bool() for name in ("attention_mask", "decoder_attention_mask"))
    union, reach = source | source[partner], written | written[partner]

    def mix(values):
        return share * values + (1 - share) * values[partner]

    def same(values):
        return values

    ours, theirs = (Own(model, mix, union, reach, batch) for model in (student, teacher))
    plain = Own(student, same, source, written, batch)
    far = (ours.scores - theirs.scores).square()
    unsteady = kl(ours.maps, mix(plain.maps))
    matched, steady = [], []
    for i, n in enumerate(reach.sum(1).tolist()):
        rows = [far[i, head, q, k] for head in range(far.shape[1]) for q in range(n) for k in range(q + 1)]
        matched.append(torch.stack(rows).mean())
        steady.append(unsteady[i, :, :n].mean())
    found = distiller(**batch)
    assert found.loss.dtype == torch.float64
    close(found.parts["attention"].detach(), torch.stack(matched).mean())
    close(found.parts["attention-consistency"].detach(), torch.stack(steady).mean())
    close(found.loss.detach(), torch.stack(matched).mean() + 0.2 * STEP / STEPS * torch.stack(steady).mean())
