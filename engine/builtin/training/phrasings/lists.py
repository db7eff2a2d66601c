"""Asking to copy, reverse, upper-case and sort: {items} of a list, or {word}, one of them alone."""

from tessera.engine.builtin.training.phrasings.phrasing import phrasings

COPYING = phrasings(
    """
    Repeat after me: {items}
    Say this back to me: {items}
    Copy the items {items}.
    just copy: {items}
    Can you repeat this list? {items}
    Write this list again:⏎{items}
    Please output the same list: {items}
    Give me the same list back: {items}
    Type this again: {items}
    Echo: {items}
    Return this list unchanged: {items}
    Here's a list: {items}⏎Copy it.
    {items}⏎Repeat the list above.
    Say {items}
    Can you write {items}?
    Duplicate this list: {items}
    I want an exact copy of: {items}
    Don't change anything, just repeat {items}
    Reproduce this list: {items}
    "{items}" - say it again
    """,
    """
    Could you say this list again? {items}
    repeat what I write: {items}
    Please write out {items}
    Print this list: {items}
    Make a copy of this list:⏎{items}
    I'd like to see this list once more: {items}
    Would you say the same as me: {items}
    """,
)
COPYING_ONE = phrasings(
    """
    Repeat the word {word}.
    repeat {word}
    Say {word}.
    say "{word}"
    Copy the word {word}.
    copy: {word}
    Can you say {word}?
    Write the word "{word}".
    write {word}
    Please repeat: {word}
    Say the word {word} again.
    Type {word}
    Echo {word}
    echo the word "{word}"
    Just say {word}, nothing else.
    Repeat after me: {word}
    Give me the word {word} back.
    I say {word}, you say it too.
    Answer with the word {word}.
    Tell me the word {word}.
    Output: {word}
    Return the word {word} unchanged.
    What I typed was {word}. Type it as well.
    Please write down {word}.
    Spell out the word {word} as it is.
    The word is {word}. Repeat it.
    """,
    """
    Could you say the word "{word}" back to me?
    say the word {word} please
    Please copy what I say: {word}
    I want to read the word {word}.
    Would you type the word {word} for me?
    Output the word {word}.
    """,
)
REVERSING = phrasings(
    """
    Reverse: {items}
    Reverse the list {items}.
    reverse this: {items}
    Can you reverse this list? {items}
    Put this list in the opposite order: {items}
    Write this list from the last to the first: {items}
    Read the list backwards: {items}
    What is {items} in reverse order?
    What's this list in reverse? {items}
    Here's a list: {items}⏎Reverse it.
    {items}⏎Reverse the list above.
    List these from last to first: {items}
    Turn the order of this list around:⏎{items}
    Swap the order of {items}
    Flip this list: {items}
    Start at the end of this list: {items}
    Give me these items backwards: {items}
    I need this list in reverse:⏎{items}
    In reverse order: {items}
    Mirror the list {items}
    """,
    """
    Could you give me this list in reverse? {items}
    list the following backwards: {items}
    Please flip the list: {items}
    Show these items in reverse order: {items}
    I'd like this list reversed: {items}
    Would you turn this list around: {items}
    Return the list in reverse order:⏎{items}
    """,
)
REVERSING_ONE = phrasings(
    """
    Reverse the word {word}.
    reverse {word}
    Reverse "{word}"
    Reverse: {word}
    Spell {word} backwards.
    spell the word "{word}" backwards
    Write {word} backwards.
    Write the word {word} in reverse.
    What is {word} backwards?
    What's {word} spelled backwards?
    Say {word} backwards
    How do you spell {word} backwards?
    Turn the word {word} around.
    Flip the letters of {word}.
    Put the letters of "{word}" in reverse order.
    Reverse the letters in {word}.
    Read {word} from right to left.
    {word} backwards
    Can you reverse this word? {word}
    Give me {word} backwards.
    Mirror the word {word}
    Start with the last letter of {word} and go to the first.
    The word is {word}. Reverse it.
    List the letters of {word} from last to first, as one word.
    In reverse, {word} is spelled how?
    Can you spell {word} from the end?
    backwards: {word}
    """,
    """
    Could you turn "{word}" backwards?
    please reverse the spelling of {word}
    Reverse the letters of {word}
    What does {word} look like backwards?
    I'd like {word} spelled backwards.
    Would you write the letters of {word} backwards?
    What is "{word}" in reverse?
    """,
)
UPPER_CASING = phrasings(
    """
    Uppercase: {items}
    Uppercase this list: {items}
    make this uppercase: {items}
    Make these all caps: {items}
    Convert to uppercase: {items}
    Convert this list to capital letters: {items}
    Can you capitalize these words? {items}
    Turn these words into capitals: {items}
    Change these to upper case: {items}
    Write {items} in all caps.
    Put {items} into capital letters.
    Type this with caps lock on: {items}
    What is {items} in upper case?
    Here's a list: {items}⏎Write it in capitals.
    {items}⏎Put the list above in upper case.
    All caps: {items}
    I need this list in big letters:⏎{items}
    Make every letter a capital: {items}
    Use only capital letters for this: {items}
    Give me {items} in capitals
    """,
    """
    Could you put this list in uppercase? {items}
    put the following in capitals: {items}
    Please make these words upper case: {items}
    Show these items in capital letters: {items}
    I'd like this list in all caps: {items}
    Would you turn this list into capitals: {items}
    Transform to upper case:⏎{items}
    """,
)
UPPER_CASING_ONE = phrasings(
    """
    Uppercase the word {word}.
    uppercase {word}
    Upper-case "{word}"
    Uppercase: {word}
    Write {word} in capitals.
    Write the word {word} in capital letters.
    write "{word}" in upper case
    What is {word} in upper case?
    What's {word} in capital letters?
    Shout {word}
    Shout the word {word}!
    Put {word} in capitals.
    Make {word} uppercase.
    Make the word "{word}" all caps.
    Convert {word} to uppercase.
    Turn {word} into capital letters.
    Change {word} to upper case.
    Capitalise every letter of {word}.
    {word} in caps
    Can you write this word in big letters? {word}
    Give me {word} in all caps.
    capitalize {word}
    The word is {word}. Write it in capitals.
    Type {word} with caps lock on.
    upper case of {word}
    caps: {word}
    Use capital letters to write {word}.
    I want to see {word} in big letters.
    """,
    """
    Could you upper-case the word "{word}"?
    please uppercase this word: {word}
    Write {word} in all caps
    How do you write {word} in capital letters?
    I'd like {word} in capitals.
    Would you put {word} in upper case for me?
    What does {word} look like in capitals?
    """,
)
SORTING = phrasings(
    """
    Sort: {items}
    Sort {items}.
    sort these numbers: {items}
    Sort the numbers {items} please.
    Can you sort this list? {items}
    Sort this list from smallest to largest: {items}
    sort ascending: {items}
    Order these numbers: {items}
    Order from low to high: {items}
    Put these numbers in order: {items}
    Put {items} in ascending order.
    Arrange {items} in order.
    Arrange these numbers from lowest to highest: {items}
    Rank these numbers, smallest first: {items}
    Line these numbers up by size: {items}
    List these with the smallest first: {items}
    What is {items} in order?
    What's the sorted version of {items}?
    What is the right order of {items}?
    Here's a list: {items}⏎Sort it.
    {items}⏎Sort the list above.
    Here are some numbers:⏎{items}⏎Put them in order.
    I have the numbers {items}. Sort them.
    I need these in increasing order: {items}
    Give me these numbers sorted: {items}
    Write these numbers by size: {items}
    Bring these numbers into order: {items}
    Starting with the smallest, list {items}
    Which order do {items} go in?
    Tidy up this list of numbers: {items}
    Small to big: {items}
    These are out of order, fix it: {items}
    Count up through these numbers: {items}
    Sort by value:⏎{items}
    """,
    """
    Could you get these numbers in the right order? {items}
    sort the following from low to high: {items}
    Please sort by size: {items}
    Show these numbers in ascending order: {items}
    I'd like this list sorted: {items}
    Would you order these numbers by size: {items}
    Return the sorted list:⏎{items}
    Arrange from smallest to largest: {items}
    Sort the following numbers in increasing order: {items}
    Put the list in order: {items}
    """,
)
