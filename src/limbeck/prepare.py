"""From what the user asked for to everything a run needs. Every user's mistake is found by then, before training."""

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from limbeck import architectures, models
from limbeck.data import kinds
from limbeck.data.corpus import Corpus, RunningText, Split
from limbeck.data.encoding import Encoded, cut, encode
from limbeck.data.label_order import align
from limbeck.data.loading import load, load_inputs
from limbeck.data.masking import Masking
from limbeck.data.mixing import Mixup
from limbeck.data.plan import padded
from limbeck.data.scarcity import scarce
from limbeck.data.tasks import Task
from limbeck.distiller import Distiller
from limbeck.engine.loop import total_steps
from limbeck.engine.world import seed_for
from limbeck.errors import LimbeckError
from limbeck.initialisers import Start, start_student
from limbeck.objectives import NamedAligner, Objective, build
from limbeck.recipe import Recipe, Stage
from limbeck.request import Request
from limbeck.spec import allowing, parse
from limbeck.trained import find_unreached, listed
from limbeck.vocabulary import shaping


@dataclass
class Prepared:
    """Everything a run needs, in place and checked."""

    request: Request
    task: Task
    tokenizer: PreTrainedTokenizerBase
    teacher: PreTrainedModel | None
    student: PreTrainedModel
    distillers: list[Distiller]  # one a stage
    aligners: dict[str, NamedAligner]
    train: Encoded
    others: dict[int, Encoded]  # by stage, what is trained on instead
    evals: dict[str, Encoded]  # the first is the one selections are made on
    longest: int
    frozen: set[str]
    notes: list[str]
    pairs: bool = False  # an example has two texts
    unreached: dict[int, list[str]] = field(default_factory=dict)  # by stage, once looked for

    @property
    def stages(self) -> list[Stage]:
        """The recipe's stages."""
        return self.request.recipe.stages

    def data(self, index: int) -> Encoded:
        """What a stage trains on."""
        return self.others.get(index, self.train)

    def keeps(self, index: int) -> str:
        """Which student a stage leaves: the best on the evaluation set for the last stage, unless the recipe says."""
        return self.stages[index].keep or ("best" if index == len(self.stages) - 1 else "last")

    def set_trained(self, index: int) -> list[str]:
        """Set afresh what a stage trains; what no objective reaches is frozen too, and named."""
        distiller = self.distillers[index]
        wanted = listed(distiller, self.stages[index], self.aligners)
        for name, parameter in distiller.named_parameters():
            parameter.requires_grad_(name in wanted and name.removeprefix("student.") not in self.frozen)
        if index not in self.unreached:
            self.unreached[index] = find_unreached(distiller, self.probe())
        for name in self.unreached[index]:
            distiller.get_parameter(name).requires_grad_(False)
        return self.unreached[index]

    def probe(self) -> dict[str, torch.Tensor]:
        """Two short examples, to see what a forward does."""
        ids = self.train.by_length[:2]
        return self.train.batch(ids, padded(self.train.lengths[ids], self.longest))


def prepare(asked: Request) -> Prepared:
    """Load data and models, start the student, bind every stage's objectives."""
    with allowing(asked.allow_code):
        return _prepare(asked)


def _prepare(asked: Request) -> Prepared:
    recipe, notes = asked.recipe, [*asked.left_out]
    declared = [{n: build(o, recipe.aligners) for n, o in stage.objectives.items()} for stage in recipe.stages]
    corpus = _corpus(asked, declared)
    notes += corpus.notes
    teacher = _teacher(asked, corpus.task, any(o.moves_teacher for stage in declared for o in stage.values()))
    tokenizer = _tokenizer(asked)
    if teacher is not None:
        corpus = _in_order_of(teacher, f"teacher {asked.teacher}", corpus, notes)
    source = _source(asked, corpus.task, teacher, tokenizer, notes)
    start = _start(asked, corpus.task, teacher, source, tokenizer, notes)
    both = [model for model in (teacher, start.student) if model is not None]
    odd = {type(model).__name__ for model in both if kinds.of(model).vocabulary and shaping(model) is None}
    notes += [f"what {name} does to its logits is not known: they are held whole, which takes memory" for name in odd]
    train, others, evals, longest = _encoded(asked, corpus, both, tokenizer, notes)
    if kinds.KINDS[corpus.task.kind].masked and teacher is not None:
        notes.append("words are hidden anew at every step, so the teacher runs at every step: nothing is cached")
    prepared = Prepared(
        request=asked,
        task=corpus.task,
        tokenizer=tokenizer,
        teacher=teacher,
        student=start.student,
        distillers=[],
        aligners={name: NamedAligner(parse(call)) for name, call in recipe.aligners.items()},
        train=train,
        others=others,
        evals=evals,
        longest=longest,
        frozen=start.frozen,
        notes=notes,
        pairs=isinstance(corpus.train, Split) and corpus.train.text_pair is not None,
    )
    for index, objectives in enumerate(declared):
        prepared.distillers.append(_distiller(prepared, index, objectives))
    return prepared


def _corpus(asked: Request, declared: list[dict[str, Objective]]) -> Corpus:
    """The data, which need labels where a stage learns from them."""
    labelled = [any(o.learns_labels and not o.idle for o in stage.values()) for stage in declared]
    _check_data(asked.recipe, labelled)
    return scarce(load(asked.data, labelled=any(labelled)), asked.data, asked.seed)


def _tokenizer(asked: Request) -> PreTrainedTokenizerBase:
    """The teacher's tokenizer, by which both models read; where there is no teacher, the student's."""
    owner = asked.teacher or asked.student
    if owner is None:
        raise LimbeckError("give --teacher, the model to distil.")
    tokenizer = models.load_tokenizer(owner)
    models.check_tokens(tokenizer, owner)
    return tokenizer


def _distiller(prepared: Prepared, index: int, objectives: dict[str, Objective]) -> Distiller:
    """What a stage trains: its objectives, bound to the models; what the user should know of them is noted."""
    asked, stage, data = prepared.request, prepared.stages[index], prepared.data(index)
    kind = kinds.KINDS[prepared.task.kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(asked.seed, index))
        distiller = Distiller(
            prepared.teacher,
            prepared.student,
            objectives,
            aligners=prepared.aligners,
            train_labels=_labels(data, kind),
            mixup=Mixup(stage.mixup, rows=stage.batch) if stage.mixup else None,
            masking=Masking(prepared.tokenizer) if kind.masked else None,
            steps=total_steps(stage, len(data)),
            seed=asked.seed,
            stage=index,
        )
    said = [f"{name} has weight 0 throughout and is left out" for name in distiller.dropped]
    said += [f"{name}: {term.layers.note}" for name, term in distiller.terms.items() if term.layers.note]
    if distiller.mixup and distiller.teacher:
        said.append("examples are mixed anew at every step, so the teacher runs at every step: nothing is cached")
    prepared.notes += [f"stage {stage.name}: {line}" for line in said]
    return distiller


def _teacher(asked: Request, task: Task, trains: bool) -> PreTrainedModel | None:
    """The teacher; one that trains may lack a classifier, and gets a fresh one."""
    if asked.teacher is None:
        return None
    with torch.random.fork_rng(devices=[]):
        # One that does not train draws at most a pooler that nothing reads; its cached answers are every seed's.
        torch.manual_seed(asked.seed if trains else 0)
        return models.load_model(asked.teacher, task if trains or kinds.KINDS[task.kind].bare else None)


def _in_order_of(teacher: PreTrainedModel, name: str, corpus: Corpus, notes: list[str]) -> Corpus:
    """The corpus with labels in the order of a teacher, which has to be one of such a task."""
    models.check_kind(teacher, corpus.task, name)
    corpus, said = align(corpus, dict(enumerate(models.label_names(teacher))), name)
    notes += [] if kinds.KINDS[corpus.task.kind].packed else [said]
    return corpus


def _source(
    asked: Request,
    task: Task,
    teacher: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    notes: list[str],
) -> PreTrainedModel:
    """The model the student is made from: the teacher, or the checkpoint that is named as the student."""
    if teacher is not None and asked.student is None:
        return teacher
    name = str(asked.student)
    if teacher is not None:
        models.check_vocabulary(tokenizer, name, models.config_of(name))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(asked.seed)  # a classifier the checkpoint lacks is drawn
        source = models.load_model(name, task)
    used = any(parse(call).name == "checkpoint" for call in asked.recipe.init)  # its classifier
    foreign = kinds.of(source).auto != kinds.KINDS[task.kind].auto
    if foreign or (used and teacher is None and not models.fits_labels(source, task)):
        predicted = kinds.of(source).predicts or ", ".join(models.label_names(source))
        notes.append(f"the classifier of {name} predicts {predicted}, which is not the task: a fresh one is made")
        source = models.renew_classifier(source, task, asked.seed)
    elif used and models.lacks_classifier(name, task):
        notes.append(f"{name} has no classifier: a fresh one is made")
    if used:
        models.adopt_labels(source, task, f"student {name}")
    return source


def _start(
    asked: Request,
    task: Task,
    teacher: PreTrainedModel | None,
    source: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    notes: list[str],
) -> Start:
    """The student as it starts, made from `source`."""
    for model in (teacher, source):
        if model is not None:
            models.adopt_padding(model, tokenizer)
            notes += models.stop_layer_drop(model)
    depths = _depths(asked, source, notes)
    start = start_student(
        asked.recipe.init,
        teacher,
        source,
        depth=depths[0],
        decoder_depth=depths[1],
        width=asked.width,
        labels=models.label_options(task),
        seed=asked.seed,
    )
    notes += start.notes
    _check_depths(start.student, teacher)
    return start


def _encoded(
    asked: Request,
    corpus: Corpus,
    both: list[PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    notes: list[str],
) -> tuple[Encoded, dict[int, Encoded], dict[str, Encoded], int]:
    """The tokens that `both` models read: to train on, by stage what is trained on instead, and by name what is
    evaluated on; and how many an example may have."""
    kind = kinds.KINDS[corpus.task.kind]
    wanted = kind.length if asked.data.max_length is None else asked.data.max_length
    longest, most = (min(models.longest_input(m.config, tokenizer, n) for m in both) for n in (wanted, models.MOST))
    columns = {column for model in both for column in architectures.inputs(model)}

    def encoded(split: Split | RunningText) -> Encoded:
        found = encode(split, tokenizer, columns, longest, kind, stride=asked.data.stride)
        notes.extend(cut(split, found, longest, most))
        return found

    texts = _training(corpus)
    train = encoded(texts)
    if isinstance(texts, Split) and len(train) > len(texts):
        notes.append(f"train: {len(texts)} examples make {len(train)} windows of at most {longest} tokens")
    evals = {name: encoded(split) for name, split in corpus.evals.items()}
    others, plain = {}, kinds.KINDS["classification"]
    for index, stage in enumerate(asked.recipe.stages):
        if stage.data:
            inputs, said = load_inputs(stage.data, asked.data, kind)
            notes += [f"stage {stage.name}: {line}" for line in said]
            others[index] = encode(inputs, tokenizer, columns, longest, kind if kind.writes else plain)
    return train, others, evals, longest


def _labels(data: Encoded, kind: kinds.Kind) -> torch.Tensor | None:
    """What tells examples apart: their class, or that they are not the same."""
    if data.right is None:
        return None
    return torch.from_numpy(data.labels) if kind.name == "classification" else torch.arange(len(data))


def _check_data(recipe: Recipe, labelled: list[bool]) -> None:
    for stage, reads_labels in zip(recipe.stages, labelled):
        if stage.data and reads_labels:
            raise LimbeckError(
                f"stages.{stage.name}.data: the stage learns from labels, and those of {stage.data} belong to another "
                "task. Only a stage without labels takes other data."
            )


def _training(corpus: Corpus) -> Split | RunningText:
    if corpus.train is None:
        raise LimbeckError("there is nothing to train on: give --train FILE, or --task NAME --data FOLDER.")
    return corpus.train


def _depths(asked: Request, source: PreTrainedModel, notes: list[str]) -> tuple[int | None, int | None]:
    """How many layers the student is to have, and how many of them its decoder where it has an encoder too."""
    two = "encoder" in architectures.sides(source)
    if asked.decoder_layers is not None and not two:
        raise LimbeckError("--decoder-layers is for models with an encoder and a decoder. Give --layers.")
    if asked.student is not None or (asked.layers, asked.decoder_layers, asked.width) != (None, None, None):
        return asked.layers, asked.decoder_layers
    sizes = architectures.shape(source)
    halves = [-(-side.layers // 2) for side in (sizes.encoder or sizes, sizes)]
    said = f"{halves[0]} and {halves[1]}" if two else str(halves[0])
    notes.append(f"no size is asked for: the student gets half the teacher's layers, {said} (--layers says another)")
    return halves[0], halves[1]


def _check_depths(student: PreTrainedModel, teacher: PreTrainedModel | None) -> None:
    if teacher is None:
        return
    for side in architectures.sides(student):
        _check_depth(*(architectures.shape(model).at(side).layers for model in (teacher, student)))


def _check_depth(above: int, below: int) -> None:
    if above < below:
        raise LimbeckError(
            f"the teacher has {above} layers and the student {below}: a teacher is at least as deep. "
            f"Give --layers {above} or fewer, or a smaller --student."
        )
