"""Asking for a JSON object with {keys} of a {text}."""

from tessera.engine.builtin.training.phrasings.phrasing import phrasings

EXTRACTION = phrasings(
    """
    Extract {keys} as JSON: {text}
    Extract {keys} from this text as JSON.⏎⏎{text}
    extract the fields {keys} from: {text}
    Extract the following fields as JSON: {keys}⏎Text: {text}
    {text}⏎Extract {keys} as JSON.
    {text}⏎⏎Return JSON with {keys}.
    {text} Give me {keys} as JSON.
    "{text}" - put {keys} into JSON
    Text: {text}⏎Keys: {keys}⏎JSON:
    Input: {text}⏎Fields: {keys}⏎Output JSON:
    Sentence: {text}⏎Make a JSON object of {keys}.
    Read this and fill in {keys} as JSON: {text}
    Here's a sentence: {text}⏎Write {keys} of it as a JSON object.
    Turn this into JSON with {keys}: {text}
    Turn the sentence "{text}" into a JSON object with {keys}.
    Convert to JSON ({keys}): {text}
    Convert this sentence to JSON. Use the keys {keys}.⏎{text}
    Parse this into JSON: {text}⏎The keys are {keys}.
    Parse "{text}" and return {keys} as JSON.
    What are {keys} in this text? Answer in JSON. {text}
    I need {keys} as JSON from: {text}
    I need a JSON object. Keys: {keys}. Text: {text}
    Please find {keys} in the text and answer in JSON.⏎{text}
    Can you get {keys} out of this sentence as JSON? {text}
    Get {keys} from "{text}" as JSON.
    Pull out {keys} as JSON: {text}
    Answer with JSON that has {keys}:⏎{text}
    Represent this as JSON with the fields {keys}: {text}
    Write this down as JSON with {keys}.⏎⏎{text}
    Summarise as JSON with {keys}: {text}
    JSON with {keys}: {text}
    json, keys {keys}: {text}
    Fill this form: {keys}⏎The text: {text}⏎Answer in JSON.
    Form fields: {keys}. Fill them from this message, in JSON: {text}
    Create a JSON object with {keys} for the text below.⏎{text}
    Respond in JSON only, with {keys}. {text}
    """,
    """
    Please extract {keys} from the following text as JSON: {text}
    Could you turn this into JSON with the keys {keys}? {text}
    Read the text and return a JSON object with {keys}.⏎{text}
    {text}⏎Write a JSON object with {keys}.
    From the sentence "{text}", extract {keys} as JSON.
    I'd like a JSON object with {keys} from this: {text}
    Text: {text}⏎Return {keys} as JSON.
    Find {keys} in this sentence and give me JSON: {text}
    Output JSON with the fields {keys}.⏎⏎{text}
    Convert the following text to JSON with {keys}: {text}
    """,
)
