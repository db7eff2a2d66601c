"""Requests that a tool serves, by the tool's description; the fields are its parameters."""

from tessera.engine.builtin.training.phrasings.phrasing import Phrasings, phrasings

REQUESTS: dict[str, Phrasings] = {
    "Get the weather in a city": phrasings(
        """
        What's the weather like in {city}?
        weather {city}
        How's the weather in {city}?
        Is it raining in {city}?
        Do I need an umbrella in {city}?
        Check the weather for {city}.
        I'm going to {city}, what's the weather there?
        Show me the weather of {city}
        """,
        """
        Could you check the weather in {city}?
        what's the weather in {city} right now
        Is it warm in {city} today?
        """,
    ),
    "Start a timer": phrasings(
        """
        timer {minutes} minutes
        I need a timer for {minutes} minutes.
        Set the timer to {minutes} minutes.
        Remind me in {minutes} minutes.
        Count down {minutes} minutes.
        Let me know when {minutes} minutes are over.
        Start counting {minutes} minutes
        Can you time {minutes} minutes?
        """,
        """
        Could you start a timer for {minutes} minutes?
        put {minutes} minutes on the timer
        Tell me when {minutes} minutes have passed.
        """,
    ),
    "Send a message to a person": phrasings(
        """
        Text {to}: {text}
        Message {to}: {text}
        send a message to {to} saying {text}
        Send "{text}" to {to}.
        Let {to} know: {text}
        Write a message to {to} that says "{text}".
        I want to text {to} the word {text}.
        Drop {to} a line: {text}
        """,
        """
        Could you send {to} a message that says {text}?
        text "{text}" to {to}
        Send {to} a text: {text}
        """,
    ),
    "Add an event to the calendar": phrasings(
        """
        Put {title} on my calendar, {day} {time}.
        new event: {title}, {day}, {time}
        I have {title} on {day} at {time}, note it in the calendar.
        Create an event called {title} for {day} at {time}.
        Book {title} at {time} on {day}.
        On {day} at {time} there is {title}, add it to my calendar.
        Plan {title} for {day} at {time}.
        Enter "{title}" in my calendar at {time} on {day}
        """,
        """
        Could you add {title} to my calendar for {day} at {time}?
        calendar: {title} on {day} at {time}
        Schedule an event {title} on {day} at {time}.
        """,
    ),
    "Translate a text into a language": phrasings(
        """
        What is {text} in {language}?
        What's the {language} word for {text}?
        {text} in {language}
        Translate to {language}: {text}
        translate the word "{text}" to {language}
        How would I say {text} in {language}?
        I need the word {text} in {language}.
        Give me {text} in {language}.
        """,
        """
        Could you put {text} in {language} for me?
        what would {text} be in {language}
        Put the word {text} into {language}.
        """,
    ),
    "Get the share price of a company": phrasings(
        """
        What's the share price of {company}?
        stock price {company}
        How much is {company} stock?
        How is the stock of {company} doing?
        What does a share of {company} cost?
        Check the stock price of {company}.
        Get me the price of {company} shares.
        I'm thinking of buying {company} shares, what's the price?
        """,
        """
        Could you check the share price of {company}?
        what is {company} stock worth
        How much does one share of {company} cost?
        """,
    ),
    "Play music of an artist": phrasings(
        """
        Play {artist}.
        play me some {artist}
        Play a song by {artist}.
        I want to hear {artist}.
        Put on some {artist}.
        Let's listen to {artist}.
        Start some music by {artist}.
        I'm in the mood for {artist}
        """,
        """
        Could you play something from {artist}?
        put {artist} on
        I'd like to listen to {artist}.
        """,
    ),
    "Search the web": phrasings(
        """
        Search for {query}.
        web search {query}
        Google {query}.
        Find something about {query} on the internet.
        Find web pages on {query}.
        Look for {query} online.
        Do a web search on {query}
        What does the web say about {query}?
        """,
        """
        Could you find information on {query} on the web?
        look {query} up online
        Search the internet for {query}.
        """,
    ),
    "Order food": phrasings(
        """
        I'd like to order {quantity} {item}.
        {quantity} {item} to go
        I want {quantity} {item}.
        We need {quantity} {item}, order them.
        Place an order for {quantity} {item}.
        Have {quantity} {item} delivered.
        Can I get {quantity} {item}?
        Bring me {quantity} {item}
        """,
        """
        Could you place an order of {quantity} {item}?
        please get {quantity} {item}
        I'm hungry, order {quantity} {item}.
        """,
    ),
    "Find out where an object is": phrasings(
        """
        Where's my {object}?
        I can't find my {object}.
        I lost my {object}, where is it?
        Have you seen my {object}?
        Help me find the {object}.
        Tell me where the {object} is.
        Where did I put my {object}?
        Look for the {object}
        """,
        """
        Could you find out where my {object} is?
        where could my {object} be
        I'm looking for my {object}.
        """,
    ),
    "Turn on a device in a room": phrasings(
        """
        Turn the {device} on in the {room}.
        {device} on in the {room}
        Switch on the {device} in the {room}.
        Switch the {room} {device} on.
        I need the {device} in the {room} on.
        Power up the {device} in the {room}.
        Activate the {device} in the {room}.
        In the {room}, turn on the {device}
        """,
        """
        Could you put the {device} in the {room} on?
        switch the {device} in the {room} on
        Start up the {device} in the {room}.
        """,
    ),
    "Book a trip between two cities": phrasings(
        """
        Book me a trip from {origin} to {destination}.
        trip {origin} to {destination}
        I want to travel from {origin} to {destination}.
        Get me a ticket from {origin} to {destination}.
        Reserve a seat from {origin} to {destination}.
        I have to go from {origin} to {destination}, book it.
        Buy a ticket to {destination} from {origin}.
        One ticket from {origin} to {destination}
        """,
        """
        Could you book a trip to {destination} from {origin}?
        book a ticket from {origin} to {destination}
        I'd like to go from {origin} to {destination}.
        """,
    ),
    "Get the number of people of a city in thousands": phrasings(
        """
        What's the population of {city}?
        population {city}
        How many inhabitants does {city} have?
        How many people are there in {city}?
        Look up the population of {city}.
        How large is the population of {city}?
        Tell me how many people {city} has.
        Number of people in {city}?
        """,
        """
        Could you tell me how many people live in {city}?
        what's the number of inhabitants of {city}
        How populous is {city}?
        """,
    ),
    "Save the phone number of a person": phrasings(
        """
        Save {name}'s number: {number}
        {name}'s number is {number}, save it.
        new contact {name}, {number}
        Add a contact: {name}, number {number}.
        Store {number} as the number of {name}.
        Save {name} with the number {number}.
        Put {name} in my contacts, the number is {number}.
        Note the phone number of {name}: {number}
        """,
        """
        Could you save {number} as {name}'s number?
        add {name} to my contacts with the number {number}
        The phone number of {name} is {number}, please save it.
        """,
    ),
}
