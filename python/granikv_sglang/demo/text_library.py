"""The prefix of the second team: the brief for rebuilding a town library. Written for this repository, made up."""

SYSTEM = """\
The town library of Elmsworth is being redesigned, and you are one member of the planning team. You know the brief \
below. Answer the question of your role from the brief only. Write two or three plain sentences that a citizen at an \
open evening would understand. Name rooms, sizes, sums and dates exactly as the brief has them. If the brief does not \
decide something, say that it is still open."""

DOCUMENT = """\
# Brief for the redesign of the Elmsworth town library

## 1. Why we build

The library in Mill Street opened in 1968. It was planned for 14,000 people and a collection of 60,000 books. Today \
Elmsworth has 31,000 inhabitants. The collection has shrunk to 48,000 books, yet the number of visits has doubled in \
ten years, to 212,000 a year. People come to sit, to meet, to print, to learn and to get warm. The building does not \
help them. It has 64 seats, one lift that is too small for a pram and a wheelchair together, and windows that face the \
car park. On wet Saturdays visitors sit on the stairs.

The council decided in March to keep the building and to change it from the inside. A new building on the meadow by \
the river was studied and given up: it would have cost 19 million, and the meadow is under water in one spring out of \
six. Keeping the concrete frame saves about 1,100 tonnes of carbon dioxide.

## 2. What we heard

During the winter the team held nine open evenings and put a question on a postcard into every loan: what would bring \
you here more often? 2,840 cards came back. The five wishes named most often were a quiet room that is truly quiet, \
longer opening hours, a place where children may be loud, better coffee, and toilets on every floor. Teenagers asked \
for a door of their own and for lockers. The blind association asked for a line in the floor that leads from the bus \
stop to the desk. The chess club, which has met at the library since 1974, asked for nothing but to be left its table \
by the north window.

Some wishes exclude each other. The readers of newspapers want silence and the ground floor; parents want the ground \
floor and noise. The team answers with distance and doors, not with rules and signs.

## 3. The rooms

The building has three floors of 900 square metres each and a cellar of 400.

Ground floor: the Market. It holds the entrance, the desk, a café with 30 seats, the shelf of new books, the newspaper \
corner and the workshop. The workshop has six benches, two sewing machines, a 3D printer and a sink. Its wall to the \
street is glass, so that people see what is made there. The ground floor may be as loud as a café.

First floor: the Nest and the Loft. The Nest is for children up to eleven years. It has a story pit with three steps, \
a round window at the height of a child of four, and toilets of two sizes. The Loft is for young people from twelve to \
eighteen. It has its own stair from the yard, 40 lockers, a kitchen counter and a room for making music that lets \
nothing be heard outside. A corridor with two doors lies between the Nest and the Loft.

Second floor: the Study. It has 110 seats at long tables with lamps, eight small rooms for two to six people, and the \
Silent Room with 24 seats. In the Silent Room there are no telephones, no computers and no talking. Its floor is cork, \
and its air comes through a duct that was made twice as wide so that it can be slow. The local archive moves to the \
second floor as well, into a room with a constant 18 degrees.

Cellar: closed stacks for 20,000 books, a sorting machine for returned books, and bicycles. The cellar is dry, but \
its ceiling is only 2.25 metres high, so no public room may be placed there.

In all there will be 240 seats instead of 64.

## 4. Hours and staff

The library is open for 38 hours a week today. It shall be open for 70 hours: from 8 to 20 on weekdays and from 10 to \
15 on Saturdays and Sundays. In 28 of these hours no staff is present. In those hours the door opens with a library \
card for everybody who is older than sixteen and has taken part in an introduction of twenty minutes. The Loft and the \
workshop stay closed when no staff is there. There will be no cameras in the reading rooms. The number of staff stays \
at nine and a half posts. Work at the desk falls by a third, because the sorting machine and the lending shelves do \
it; the hours gained go to the workshop, to the Loft and to visits in schools.

## 5. Getting there and getting around

The bus stop moves forty metres so that it lies opposite the entrance. A line of ribbed stone leads from there to the \
desk and on to the lifts. There will be two lifts; the larger one holds a stretcher. All doors that the public uses \
open by themselves. Signs use letters of at least 40 millimetres and a picture for every room. Each floor has one \
colour: yellow for the Market, green for the first floor, blue for the Study. The colours differ in brightness too, so \
that people who do not see colours can tell them apart. The induction loop for hearing aids covers the desk, the story \
pit and the eight small rooms.

Of the 52 places in the car park 30 become a garden with trees and benches. Six of the rest are for disabled people, \
and four have sockets for electric cars. 80 bicycles can be parked in the yard and 40 in the cellar.

## 6. Energy

The building uses 310,000 kilowatt-hours of heat a year. New windows, 22 centimetres of wood fibre on the outer wall \
and a heat pump that draws on the river shall bring that down to 95,000. The roof carries solar panels with a peak of \
84 kilowatts. On a sunny day they give more than the building needs, and the school next door takes the rest. There is \
no cooling, except in the archive. In summer the windows of the stair open at night and the warm air leaves through \
the roof. The old radiators are sold by the piece; 70 families have asked for one already.

## 7. Money and time

The council has set a limit of 8.4 million. The state pays 2.1 million of it on condition that the building opens \
before the end of the year after next. The friends of the library have collected 260,000, which pays for the furniture \
of the Nest and the Loft. Construction is estimated at 6.3 million, furniture and machines at 0.9 million, fees at 0.8 \
million. 0.4 million is kept for surprises. If the reserve is used up, the café is built later; the Silent Room, the \
lifts and the toilets may not be given up.

Work begins in September and lasts fifteen months. The library moves into the empty post office in Station Road during \
that time, with 15,000 books and 40 seats. The archive cannot be used for five months. Books on loan when the move \
begins need not be brought back before it is over: the citizens of Elmsworth are asked to keep 12,000 books at home, \
because then they need not be carried.

## 8. Still open

Three matters are not decided. The name of the café will be found by a competition among schools. The old mural in the \
reading hall, painted in 1969, hides behind a shelf; whether it can be moved is being studied until May. And the \
council has not yet said whether the fee for late returns, which brings in 11,000 a year, will be dropped."""
