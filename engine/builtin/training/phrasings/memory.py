"""Telling something {v} about oneself, and asking for it later."""

from tessera.engine.builtin.training.phrasings.phrasing import phrasings

NAME_TOLD = phrasings(
    """
    I'm {v}.
    hi, i'm {v}
    Hello, my name's {v}.
    You can call me {v}.
    Call me {v}, please.
    {v} is my name.
    This is {v} speaking.
    My friends call me {v}.
    They named me {v}.
    """,
    """
    Hi, the name is {v}!
    Just say {v} to me.
    Everybody calls me {v}.
    """,
)
NAME_ASKED = phrasings(
    """
    What's my name?
    Do you know my name?
    do you remember my name
    Can you tell me my name?
    Say my name.
    Who did I say I am?
    What did I say my name was?
    Which name did I tell you?
    What do people call me?
    """,
    """
    Do you still remember my name?
    what was my name again
    Could you tell me what I'm called?
    """,
)
CITY_TOLD = phrasings(
    """
    I'm from {v}.
    I live in {v} now.
    My home is {v}.
    I have lived in {v} for years.
    I moved to {v}.
    my flat is in {v}
    {v} is where I live.
    {v} is my home town.
    """,
    """
    I'm living in {v}.
    My house is in {v}.
    I call {v} my home.
    """,
)
CITY_ASKED = phrasings(
    """
    Which city do I live in?
    What city am I from?
    do you know where I live
    Do you remember my city?
    Where did I say I live?
    Where am I from?
    Tell me where I live.
    What's my home town?
    """,
    """
    Could you say where I live?
    what city do I live in
    Do you remember where I live?
    """,
)
COLOUR_TOLD = phrasings(
    """
    My favorite color is {v}.
    I like {v} most of all colours.
    {v} is the colour I like best.
    The colour that I like most is {v}.
    I think {v} is the nicest colour.
    of all colours I prefer {v}
    The best colour is {v}.
    """,
    """
    My favourite colour's {v}.
    {v} is the best colour for me.
    The colour I love is {v}.
    """,
)
COLOUR_ASKED = phrasings(
    """
    What's my favorite color?
    Which colour do I prefer?
    do you remember my favourite colour
    Do you know what colour I like?
    What colour did I say I like?
    Tell me my favourite colour.
    Which one is my colour?
    """,
    """
    Could you name my favourite colour?
    what was my favourite colour again
    Which colour do I love?
    """,
)
FOOD_TOLD = phrasings(
    """
    I love eating {v}.
    I really like {v}.
    My favorite food is {v}.
    I could eat {v} every day.
    {v} is what I like to eat.
    the food I like best is {v}
    I'm a big fan of {v}.
    For lunch I like {v}.
    """,
    """
    I enjoy eating {v}.
    The best food is {v}.
    I like {v} a lot.
    """,
)
FOOD_ASKED = phrasings(
    """
    What's my favorite food?
    What food do I like?
    do you remember what I like to eat
    What do I love to eat?
    What did I say I like to eat?
    Tell me my favourite food.
    Which food is my favourite?
    """,
    """
    Could you tell me what I like to eat?
    what was my favourite food again
    What do I enjoy eating?
    """,
)
AGE_TOLD = phrasings(
    """
    I'm {v} years old.
    I'm {v}.
    My age: {v}
    I just turned {v}.
    I have turned {v} now.
    i am {v}
    It was my birthday, I am {v} now.
    At the moment I'm {v} years of age.
    """,
    """
    I turned {v} last week.
    I have lived for {v} years.
    I am at the age of {v}.
    """,
)
AGE_ASKED = phrasings(
    """
    What's my age?
    how old did I say I am
    Do you know how old I am?
    Do you remember my age?
    Tell me my age.
    Can you tell me how old I am?
    How many years do I have?
    """,
    """
    Could you say how old I am?
    do you remember how old I am
    How old am I again?
    """,
)
JOB_TOLD = phrasings(
    """
    I'm a {v}.
    I work as {v}.
    I'm working as a {v}.
    My profession is {v}.
    I earn a living as a {v}.
    by profession i'm a {v}
    For work I am a {v}.
    They pay me to be a {v}.
    """,
    """
    My work is that of a {v}.
    I have a job as a {v}.
    In my job I'm a {v}.
    """,
)
JOB_ASKED = phrasings(
    """
    What's my job?
    what is my profession
    Do you know what I do for work?
    Do you remember my job?
    What kind of work do I do?
    Tell me my job.
    How do I earn my money?
    """,
    """
    Could you tell me what my job is?
    do you remember what I work as
    What did I say my job was?
    """,
)
PET_TOLD = phrasings(
    """
    I've got a {v}.
    I have a {v} at home.
    I keep a {v}.
    My pet's a {v}.
    We have a {v} as a pet.
    at home i have a {v}
    A {v} lives with me.
    I bought a {v} as a pet.
    """,
    """
    I've a {v} as my pet.
    I own a pet, a {v}.
    My animal is a {v}.
    """,
)
PET_ASKED = phrasings(
    """
    What's my pet?
    what kind of pet do I have
    Which animal do I own?
    Do you know which animal I have?
    Do you remember my pet?
    Tell me what pet I have.
    What animal lives with me?
    """,
    """
    Could you tell me which pet I have?
    do you remember what animal I have
    Which pet is mine?
    """,
)
NUMBER_TOLD = phrasings(
    """
    The number is {v}.
    My number is {v}.
    Remember the number {v}.
    Keep the number {v} in mind.
    the pin is {v}
    My secret code is {v}.
    {v} is my lucky number.
    Please remember this code: {v}
    """,
    """
    Remember this number: {v}
    My code is {v}.
    The number to remember is {v}.
    """,
)
NUMBER_ASKED = phrasings(
    """
    What's the number?
    what's the code
    Which number did I tell you?
    Do you remember the number?
    Do you know the code?
    Tell me the number.
    What number did I say?
    What was my number?
    """,
    """
    Could you tell me the code?
    do you still know the number
    Which code did I give you?
    """,
)
