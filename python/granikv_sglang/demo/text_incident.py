"""The prefix of the first team: a handbook and the incident it is about. Written for this repository, made up."""

SYSTEM = """\
You are one member of the incident review team of Northquay Ferries, a company that sells tickets for eleven ferry \
lines. You know the handbook and the incident record below. Answer the question of your role from these pages only. \
Write two or three plain sentences. Name times, numbers and systems exactly as the record has them. If the record \
does not say, answer that it does not say. Do not blame persons; describe what the system allowed to happen."""

DOCUMENT = """\
# Part 1. How we review an incident

A review starts within two working days after service is restored. It lasts at most one hour. Six roles take part: \
the facilitator, the timekeeper, the database owner, the network owner, the customer voice and the writer of actions. \
Each role reads the whole record before the meeting, because questions that the record answers cost everybody time.

The review has one purpose: to change the system so that the same chain of events cannot happen again. It is not a \
search for the person who typed the command. A command that one tired person can type at four in the morning is part \
of the system, and so is the alert that nobody understood. We write "the tool accepted an empty date" and not "the \
operator forgot the date".

Severity is set by what travellers noticed. Severity 1 means that no ticket could be sold on any line for more than \
ten minutes. Severity 2 means that one sales channel was down, or that all channels were slow, for more than ten \
minutes. Severity 3 is anything that only staff noticed. Severity may be raised during the review, never lowered.

The timeline comes first. Every entry has a time in harbour time, a source and one fact. Opinions have no place in \
it. When two sources disagree about a time, both are kept, and the difference is explained if possible. Detection, \
diagnosis, mitigation and recovery are marked. Detection is the first moment at which a person or an alert knew that \
something was wrong. Diagnosis is the moment at which the true cause was first said aloud. Mitigation is the moment \
at which travellers were helped, even if the cause was still there. Recovery is the moment at which all measurements \
were back in their usual range.

After the timeline come the contributing factors. There is never only one. We look for at least one factor in each of \
five places: the change that was made, the tests that let it pass, the alert that came late, the documents that \
misled, and the design that let a small fault grow. Each factor is written as a sentence that would be true even if \
other people had been on duty.

Actions close the review. An action has an owner, a date and a way to prove that it is done. "Be more careful" is not \
an action. "Improve monitoring" is not an action either, because nobody can say when it is finished. Good actions \
remove a step, add a limit or make a wrong state impossible. A review ends with at most five actions, because longer \
lists are not finished. Actions are looked at again after thirty days, and after ninety days the head of operations \
reads the list of those still open.

The summary for travellers is written by the customer voice. It is shorter than one hundred and fifty words, it says \
what happened, who was affected, what was done for them and what will change. It uses no names of internal systems.

# Part 2. The record of incident 417

Date: Saturday, 14 June. Severity: 1. Length: 94 minutes without sales, from 06:52 to 08:26.

## Background

Tickets are sold through three channels: the web shop, the machines on the piers and the counters. All three ask one \
service, called Berth, how many places are free on a sailing. Berth keeps its counts in a database with one primary \
server, called Anchor, and two replicas, called Buoy and Cleat. Writes go to Anchor. Reads may go to any of the \
three. A pool of connections stands between Berth and the database; it holds 120 connections, and each question uses \
one of them for about four milliseconds.

On Friday the summer timetable was loaded. It has 2,316 sailings, three times as many as the spring timetable. The \
loading tool had been tested with the spring timetable only. The tool writes all sailings in one transaction and \
holds a lock on the table of sailings until it is done. With the spring timetable that took nine seconds.

## Timeline

06:30. The scheduled job starts to load the summer timetable a second time, because the first run on Friday evening \
had ended with a warning about a missing pier code. Source: job log.
06:41. Replica Buoy falls behind Anchor by more than sixty seconds. An alert is sent to the channel for information, \
not to the pager. Source: alert log.
06:52. All 120 connections of the pool are in use. Berth answers every new question with an error. The web shop shows \
"no places free" on all lines. Source: metrics of Berth.
06:58. A counter clerk at Pier 3 telephones the control room: the machines say that all ferries are full, but the \
ferry in front of her is empty. This is the detection. Source: telephone log.
07:05. The person on call restarts Berth. The pool fills again within forty seconds. Source: deployment log.
07:14. The network owner finds no loss of packets between Berth and Anchor and says so in the channel. Source: chat.
07:31. The counters change to paper tickets. About 600 paper tickets are sold until the end. This is the mitigation. \
Source: report of the harbour master.
07:49. The database owner sees one transaction that has held a lock for 79 minutes and names the loading job as the \
cause. This is the diagnosis. Source: chat.
07:53. The job is stopped. Anchor begins to roll the transaction back. Source: job log.
08:19. The roll-back ends. Connections become free. Source: database log.
08:26. Sales on all channels are back in their usual range. This is the recovery. Source: metrics of Berth.

## What travellers noticed

Some 4,100 people tried to buy a ticket in those 94 minutes. 2,750 of them tried on the web, and 1,900 of those came \
back later the same day. 38 people missed the last ferry that would have reached the island festival in time. They \
were offered the noon ferry without charge and a voucher of 25 crowns. Four ferries left Pier 3 with fewer than ten \
people on board. Two complaints were printed in the newspaper of the island.

## What is known about the cause

The loading tool checks every sailing against the table of piers. One pier, the new jetty at Saltholm, had no code. \
For each sailing that calls there the tool waited two seconds and tried again, three times. 790 sailings call at \
Saltholm. The tool wrote "waiting for pier code" to a file that no one reads, and it kept its lock all the while. The \
test of the tool uses a made-up list of piers in which every pier has a code.

Berth has no time limit on a question to the database. When a question waits for a lock, its connection waits as \
well. The error for "I cannot know how many places are free" and the answer "no places are free" look the same to the \
web shop: both are the number zero. The alert on replicas was moved from the pager to the information channel in \
March, after eleven false alarms in one week.

The page "Berth does not answer" in the operations manual says: restart Berth, then look at the network. It was \
written two years ago, when Berth had its own small database on the same machine. It does not mention locks.

## Open questions

It is not known why the first run on Friday evening ended with a warning and not with an error. It is not known \
whether Cleat could have served reads alone, because no one tried. It is not known how many travellers at the machines \
gave up without pressing a button."""
