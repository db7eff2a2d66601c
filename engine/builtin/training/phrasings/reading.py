"""Asking a {question} about a {text}."""

from tessera.engine.builtin.training.phrasings.phrasing import phrasings

READING = phrasings(
    """
    {text} {question}
    {text}⏎{question}
    {text}⏎⏎{question}
    {question}⏎{text}
    {question}⏎⏎Text: {text}
    Context: {text}⏎Question: {question}
    Context:⏎{text}⏎⏎Question:⏎{question}
    Context: {text}⏎⏎{question}⏎Answer:
    Passage: {text}⏎Question: {question}⏎Answer:
    Story: {text}⏎{question}
    Document:⏎{text}⏎⏎Q: {question}⏎A:
    Here is a short story. {text} {question}
    Here's some information: {text}⏎⏎{question}
    Here is what I know: {text} So, {question}
    I read this: "{text}" {question}
    I have a text for you: {text} Now my question: {question}
    I will give you a text and a question. {text} {question}
    Someone told me: {text} {question}
    Please read the following and answer.⏎⏎{text}⏎⏎{question}
    Read the passage below and answer the question.⏎{text}⏎{question}
    Read this: {text} {question}
    Read carefully: {text}⏎{question}
    Answer the question about the text.⏎Text: {text}⏎Question: {question}
    Answer this question: {question}⏎Use this text: {text}
    Use the text below to answer: {question}⏎⏎"{text}"
    Based on the following: {text}⏎{question}
    Based on this text, {question}⏎{text}
    According to this text: "{text}" {question}
    From the text "{text}", {question}
    Suppose this is true: {text} {question}
    Imagine the following. {text} {question}
    Facts: {text}⏎Tell me: {question}
    Notes:⏎{text}⏎⏎{question}
    My notes say: {text} {question}
    The text is: {text}⏎The question is: {question}
    Consider this paragraph: {text}⏎{question}
    You know the following: {text}⏎{question}
    Given the text "{text}", answer this: {question}
    Question: {question}⏎Text: {text}
    <text>{text}</text>⏎{question}
    '''{text}'''⏎{question}
    """,
    """
    Here is some text: {text}⏎⏎Please answer: {question}
    Read the following text: {text} {question}
    Given this information: {text}⏎{question}
    Paragraph: {text}⏎Question: {question}
    Using the text below, answer the question.⏎⏎{text}⏎⏎{question}
    I have a question about this text: "{text}" {question}
    Look at this text and tell me: {question}⏎{text}
    Information: {text}⏎⏎Q: {question}
    Let me tell you something. {text} Now, {question}
    According to the following text, {question}⏎⏎{text}
    Could you read this and answer? {text} {question}
    """,
)
