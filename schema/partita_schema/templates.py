"""Commented configurations to start from, one for each kind of task."""

from collections.abc import Sequence

TASKS = {
    "classify": "each text gets one of a few labels",
    "tag": "a text gets those of a few labels that apply",
    "extract": "fields are taken out of a text, as JSON",
    "answer": "a question gets an answer",
    "score": "a text gets a number",
    "chat": "a message gets a reply, with a system message",
    "entities": "each word of a text gets a tag, such as the kind of an entity",
    "continue": "documents are learned as they are (language modelling)",
    "pairs": "the better of two answers is learned (preference pairs)",
    "feedback": "answers that are good or bad are learned from (KTO)",
}
"""Names of the tasks, with descriptions."""
LEARNED = ("pairs", "feedback")
"""Tasks that are only for training."""

FEATURES = {
    "classify": """\
input_features:
  - {name: text, type: text}              # column: NAME if the column has another name
output_features:
  - name: label
    type: category
    decoder:
      labels: [negative, neutral, positive]
      fallback_label: neutral             # for answers in which no label is found
prompt:
  task: Classify the text as negative, neutral or positive.
""",
    "tag": """\
input_features:
  - {name: text, type: text}
output_features:
  - name: topics
    type: set                             # rows hold a list, or text such as: sports, politics
    decoder:
      labels: [economy, politics, sports]
prompt:
  task: Write those of the topics economy, politics and sports that the text is about, as a JSON array.
""",
    "extract": """\
input_features:
  - {name: text, type: text}
output_features:
  - name: fields
    type: json
    decoder:
      json_schema:                        # answers that do not fit it are errors
        type: object
        properties: {name: {type: string}, date: {type: string}}
        required: [name, date]
prompt:
  task: Write the name and the date in the text as JSON.
""",
    "answer": """\
input_features:
  - {name: question, type: text}
output_features:
  - {name: answer, type: text}
prompt:
  task: Answer the question.
""",
    "score": """\
input_features:
  - {name: text, type: text}
output_features:
  - name: score
    type: number
    decoder: {minimum: 1, maximum: 5}
prompt:
  task: Rate the text from 1 to 5.
""",
    "chat": """\
input_features:
  - {name: message, type: text}
output_features:
  - {name: reply, type: text}
prompt:
  system: You are a friendly assistant. Answer in one or two sentences.
  template: '{message}'                   # the model's chat template is put around it
""",
    "entities": """\
input_features:
  - {name: tokens, type: text}            # a text, or a list of words
output_features:
  - name: tags
    type: tags
    decoder: {labels: [O, B-PER, I-PER, B-ORG, I-ORG]}
""",
    "pairs": """\
input_features:
  - {name: prompt, type: text}
output_features:
  - {name: answer, type: preference, chosen: chosen, rejected: rejected}
""",
    "feedback": """\
input_features:
  - {name: prompt, type: text}
output_features:
  - {name: completion, type: text, label: label}   # true for good answers
""",
    "continue": """\
output_features:
  - {name: text, type: text}              # the column of the documents
""",
}

SCRATCH = """\
base_model:
  type: scratch                           # a new model; its tokenizer is trained on the data
  architecture: llama
  size: tiny
"""

ADAPTER = """\
adapter: {type: lora, r: 16}              # remove it to train all weights
# quantization: {bits: 4}                 # base weights in 4 bits: less memory
"""

FINETUNE = """\
trainer:
  type: finetune
  epochs: 3
  batch_size: auto                        # measured on the device; or a number
  effective_batch_size: 16                # rows a step, by accumulation
"""

PREFERENCE = """\
trainer:
  type: preference
  loss: {type: dpo, beta: 0.1}            # or orpo or simpo
  epochs: 1
  batch_size: auto                        # measured on the device; or a number
  effective_batch_size: 16                # pairs a step, by accumulation
"""

KTO = """\
trainer:
  type: kto
  undesirable_weight: auto                # good and bad answers weigh the same
  epochs: 1
  batch_size: auto                        # measured on the device; or a number
  effective_batch_size: 16                # rows a step, by accumulation
"""

ZERO_SHOT = """\
trainer:
  type: none                              # nothing is trained; write finetune to do so
  batch_size: auto                        # measured on the device; or a number
"""


def template(
    task: str,
    *,
    model: str,
    data: str,
    train: bool,
    features: str | None = None,
    ignore_keys: Sequence[str] = (),
) -> str:
    """Return a configuration for a task of TASKS.

    Args:
        task: Key of TASKS.
        model: Hub id, folder, or `scratch`.
        data: Path of the rows, relative to the file.
        train: Whether to train; tasks in LEARNED always do.
        features: input_features, output_features and prompt as YAML. Default: typical ones for the task.
        ignore_keys: Keys of messages of a dialogue to ignore.
    """
    from partita_schema.dump import scalar

    scratch, train = model == "scratch", train or task in LEARNED
    trainer = {"pairs": PREFERENCE, "feedback": KTO}.get(task, FINETUNE)
    ignored = ", ".join(map(scalar, ignore_keys))
    base = SCRATCH if scratch else f"base_model: {scalar(model)}\n"
    parts = [
        f"# partita: {TASKS[task]}. All keys: partita schema --markdown\nversion: 1\n{base}",
        FEATURES[task] if features is None else features,
        "# generation: {do_sample: false}         # greedy; by default as the checkpoint says\n",
        f"data:\n  source: {scalar(data)}\n  split: {{type: random, probabilities: [0.9, 0.05, 0.05]}}\n",
        f"  dialogue: {{ignore_keys: [{ignored}]}}   # keys of messages that the model does not see\n"
        if ignored
        else "",
        "  batching: {type: chunk}                 # documents are joined and cut\n" if task == "continue" else "",
        ADAPTER if train and not scratch else "",
        trainer if train else ZERO_SHOT,
    ]
    return "".join(parts)
