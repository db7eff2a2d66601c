"""Greetings, questions about the model itself, and what it cannot answer; {bot} is its name."""

from tessera.engine.builtin.training.phrasings.phrasing import phrasings

GREETING = phrasings(
    """
    Hello!
    hi
    hey
    Hi there!
    hello there, how's it going?
    Hey {bot}!
    Hi {bot}, how are you doing?
    Good morning to you!
    Good evening, {bot}.
    how are you
    How are you doing today?
    How's everything?
    What's up?
    Nice to meet you!
    Pleased to meet you, {bot}
    Hello, is anyone there?
    Are you there?
    hello world
    Yo!
    Heya
    Good to see you.
    Hi, I'm new here.
    Hello, I just installed you.
    hey, how is your day?
    Greetings, {bot}!
    How do you do?
    """,
    """
    Hey, how have you been?
    hello, I hope you are well
    Hi, good to meet you
    hey, are you doing well?
    Good afternoon! How goes it?
    Hello, I'm happy to see you!
    hi, I wanted to say hello
    """,
)
IDENTITY = phrasings(
    """
    Who are you?
    what are you
    What's your name?
    Do you have a name?
    What should I call you?
    Tell me your name.
    Tell me about yourself.
    Tell me who you are.
    Are you a robot?
    Are you an AI?
    Are you a bot or a human?
    Which AI is this?
    Who is this?
    Who am I chatting with?
    What model is this?
    May I ask your name?
    Can you introduce yourself?
    say who you are
    Describe yourself.
    What kind of AI are you?
    """,
    """
    Could you say something about yourself?
    What name do you have?
    I'd like to know your name.
    Am I talking to a robot?
    Please give me your name
    What kind of bot are you?
    what do they call you
    Who exactly are you?
    """,
)
ABILITIES = phrasings(
    """
    What can you do?
    what are you able to do
    What do you know how to do?
    How can you help?
    What can you help me with?
    What tasks can you do?
    What are you for?
    What should I ask you?
    Tell me what you can do.
    List your skills.
    What are your abilities?
    Show me what you can do.
    How do I use you?
    what's your purpose
    Give me examples of what you can do.
    help
    """,
    """
    Could you list what you can do?
    what things can you do
    What kinds of questions can I ask you?
    What are you capable of?
    How can I use you?
    """,
)
THANKS = phrasings(
    """
    Thanks!
    thank you
    Thank you very much!
    thanks a million
    Thanks, that helped.
    Thank you for your help, {bot}.
    That was helpful, thanks.
    Great, thank you!
    Perfect, thanks a lot.
    ok thanks
    I appreciate it.
    Much appreciated!
    Thanks for the answer.
    thx
    Well done, thank you.
    """,
    """
    Your help was great, thanks.
    thanks, you helped me a lot
    I'm thankful for that.
    Good job, thanks!
    I really appreciate your help.
    """,
)
BYE = phrasings(
    """
    Bye!
    goodbye
    Bye for now.
    See you later!
    see you tomorrow
    Good night!
    Take care, {bot}.
    I have to go now.
    I'm leaving, bye.
    That's all, goodbye.
    Talk to you later.
    Have a nice day!
    Until next time!
    I'm off, see you.
    cya
    """,
    """
    Bye, see you soon!
    it's time to say goodbye
    I need to go now, bye!
    See you next time.
    Have a good day, bye
    """,
)
UNKNOWN = phrasings(
    """
    What's the capital of {place}?
    Who is the king of {place}?
    who is the president of {place}
    How many people speak {thing}?
    How tall is {person}?
    When was {person} born?
    What did {person} write?
    Tell me about {topic}.
    Tell me a story about a {thing}.
    tell me a joke
    Write an essay about {topic}.
    Write a letter to {person}.
    write a short story about a {quality} {thing}
    Write a python function that sorts {thing}s.
    Can you explain how {topic} works?
    I'd like to learn about {topic}.
    Why is {topic} important?
    Who discovered {topic}?
    Where does {food} come from?
    How do you make {food}?
    Give me a recipe with {food}.
    What goes well with {food}?
    Is {food} healthy?
    How much does a {thing} cost?
    Which {thing} should I buy?
    How can I fix my {thing}?
    What is a {thing} made of?
    What's the difference between {food} and {other}?
    Which is better, {food} or {other}?
    How long does a {other} live?
    What do {other}s eat?
    Do you believe in {topic}?
    What's your favourite {thing}?
    Are you good at {topic}?
    What's the news from {place}?
    How do I get to {place}?
    Is {place} a nice city?
    What is {invented}?
    What does the word {invented} mean?
    Have you heard of {person}?
    What year is it?
    What's the meaning of life?
    Sing me a song.
    Recommend a book about {topic}.
    What should I cook tonight?
    Summarise the book "{invented}".
    Who will win the {thing} cup?
    """,
    """
    Could you say something about {topic}?
    what is the largest {thing} in the world
    Who painted the {quality} {thing}?
    What is {person} famous for?
    Explain {topic} to me.
    Write me a poem about {topic}
    How do I bake {food}?
    When did {topic} begin?
    What do you know about {place}?
    I'd like a recipe for {food}.
    Can you recommend a {thing}?
    Why do {other}s sleep?
    """,
)
