"""Conversion of the dialogue formats of datasets to one common form.

The common form is a mapping with `messages`, each with `role` and `content`, and `labels`: the correct answers to the
last message, or an empty list if unknown. It may also have `tools`, the definitions of the tools of the dialogue, and
`verbatim`, whether the contents of the messages are pieces of one text that nothing is added to.

Assistant messages have `train` (whether they are in the loss) and may have `labels` with several correct answers,
`tool_calls`, and `reasoning_content`. Tool messages may have `name` and `tool_call_id`. Assistant messages before the
first question are never in the loss. If the answer has tool calls or reasoning, the row also has `answer`, the message
without its role; `labels` then holds a text for metrics and reports.

If a turn has several outputs (`partita_schema.turn_outputs`), their cells are in `outputs` of a message, by key. They
become `values` of the answer by output, and `labels` are mappings of values.

Nothing is dropped silently: a row is unusable if a message has an unknown key unless the caller lists the key in
`ignored`. An invalid dialogue raises FormatError, which names the message by its number from 1.
"""
