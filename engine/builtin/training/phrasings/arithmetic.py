"""Asking for sums, differences and products of {a} and {b}."""

from tessera.engine.builtin.training.phrasings.phrasing import phrasings

ADDITION = phrasings(
    """
    What's {a} plus {b}?
    what is {a}+{b}
    {a} + {b} equals?
    {a} and {b} make how much?
    How much do {a} and {b} make?
    Add {a} to {b}.
    add together {a} and {b}
    Add up {a} and {b}.
    Please add these numbers: {a}, {b}
    Sum: {a}, {b}
    What do you get if you add {a} and {b}?
    What's the sum of {a} and {b}?
    give me the sum of {a} and {b}
    I have {a} and get {b} more. How many do I have?
    I need the total of {a} and {b}.
    What is the total of {a} and {b}?
    Can you work out {a} + {b} for me?
    work out {a} plus {b}
    Calculate the following: {a} + {b}
    Calculate:⏎{a} + {b}
    Solve {a} + {b}.
    {a} + {b} = ?
    {a} added to {b} is what?
    If I put {a} and {b} together, what do I get?
    How many are {a} and {b} together?
    Do you know what {a} plus {b} is?
    tell me what {a} + {b} makes
    Increase {a} by {b}.
    Please compute the sum {a} + {b}
    I'm trying to add {a} and {b}, what's the answer?
    Count {b} on from {a}.
    What number is {b} more than {a}?
    My homework says "{a} + {b}". What's the answer?
    evaluate {a} + {b}
    plus: {a} {b}
    Let's add {a} and {b}.
    We sold {a} today and {b} yesterday, how many in all?
    """,
    """
    Could you tell me how much {a} plus {b} is?
    what does {a} plus {b} come to
    What's the result of {a} + {b}?
    Find the sum of {a} and {b}.
    I'd like to know what {a} + {b} is.
    What will {a} and {b} sum up to?
    {a} plus {b} equals what?
    What do {a} and {b} add up to?
    Can you do this sum:⏎{a} + {b}
    Please give me {a} + {b}
    How much would {a} and {b} be in total?
    """,
)
SUBTRACTION = phrasings(
    """
    What's {a} minus {b}?
    what is {a}-{b}
    {a} - {b} equals?
    {a} less {b} is what?
    How much is {a} less {b}?
    Take {b} away from {a}.
    take away {b} from {a}
    Subtract: {a} - {b}
    Deduct {b} from {a}.
    What's left if you take {b} from {a}?
    What do you get if you subtract {b} from {a}?
    I have {a} and give away {b}. How many are left?
    If I remove {b} from {a}, what remains?
    Can you work out {a} - {b} for me?
    work out {a} minus {b}
    Calculate the following: {a} - {b}
    Calculate:⏎{a} - {b}
    Solve {a} - {b}.
    {a} - {b} = ?
    What is the difference {a} - {b}?
    give me the difference: {a} - {b}
    Do you know what {a} minus {b} is?
    tell me what {a} - {b} makes
    Decrease {a} by {b}.
    Reduce {a} by {b}.
    Please compute the difference {a} - {b}
    I'm trying to subtract {b} from {a}, what's the answer?
    Count {b} back from {a}.
    What number is {b} less than {a}?
    My homework says "{a} - {b}". What's the answer?
    evaluate {a} - {b}
    minus: {a} {b}
    From {a} take {b}.
    I had {a} euros and spent {b}, how much is left?
    {b} taken from {a} is how much?
    Let's subtract {b} from {a}.
    """,
    """
    Could you tell me how much {a} minus {b} is?
    what does {a} minus {b} come to
    What's the result of {a} - {b}?
    Find the difference: {a} - {b}.
    I'd like to know what {a} - {b} is.
    What stays if {b} is subtracted from {a}?
    {a} minus {b} equals what?
    What remains of {a} if you take away {b}?
    Can you do this subtraction:⏎{a} - {b}
    Please give me {a} - {b}
    How much would {a} minus {b} be?
    """,
)
MULTIPLICATION = phrasings(
    """
    What's {a} times {b}?
    what is {a}*{b}
    {a} x {b} equals?
    {a} * {b} makes what?
    How much do {a} times {b} make?
    Multiply {a} and {b}.
    multiply {a} with {b}
    Multiply: {a}, {b}
    What do you get if you multiply {a} by {b}?
    What's the product of {a} and {b}?
    give me the product of {a} and {b}
    {a} boxes with {b} balls each: how many balls?
    I buy {a} bags of {b} nuts. How many nuts are that?
    Can you work out {a} x {b} for me?
    work out {a} times {b}
    Calculate the following: {a} * {b}
    Calculate:⏎{a} * {b}
    Solve {a} x {b}.
    {a} x {b} = ?
    {a} * {b} = ?
    {a} multiplied by {b} is what?
    How many are {a} times {b}?
    Do you know what {a} times {b} is?
    tell me what {a} x {b} makes
    Please compute the product {a} * {b}
    I'm trying to multiply {a} by {b}, what's the answer?
    My homework says "{a} x {b}". What's the answer?
    evaluate {a} * {b}
    times: {a} {b}
    Let's multiply {a} by {b}.
    In the times tables, what is {a} x {b}?
    {a} rows of {b} chairs, how many chairs?
    {a} groups of {b} are how many?
    Take {a} times {b}.
    """,
    """
    Could you tell me how much {a} times {b} is?
    what does {a} times {b} come to
    What's the result of {a} * {b}?
    Find the product of {a} and {b}.
    I'd like to know what {a} x {b} is.
    What will {a} times {b} give?
    {a} times {b} equals what?
    Can you do this multiplication:⏎{a} x {b}
    Please give me {a} * {b}
    How much would {a} times {b} be?
    What is {a} multiplied by {b}?
    """,
)
