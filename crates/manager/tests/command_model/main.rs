//! The protocol of the command page under `loom`: the functions that run live, in every
//! interleaving with few forced switches.
//!
//! The protocol must hold as it is, and fail when anything of it is broken: the memory order of an
//! access weakened by a step, a wake-up left out, a step of an exclusion swapped. What can be
//! weakened without harm is listed with the reason.

mod memory;
mod scenes;

use std::sync::atomic::Ordering::{self, *};

use memory::Access::{self, *};
use memory::Broken;
use scenes::Outcome::{self, *};
use scenes::Scene::{self, *};
use scenes::Variant;
use undercroft_wire::command::Word::{self, *};

/// The effect of a weaker memory order.
enum Weaker {
    /// The scene fails like this.
    Fails(Scene, Outcome),
    /// None; the scenes where the order matters, and why it does no harm.
    Harmless(&'static [Scene], &'static str),
}
use Weaker::*;

/// Every access of the protocol that has a memory order, and the effect of a weaker one.
const ORDERS: [(Access, Word, Ordering, Ordering, Weaker); 32] = [
    // Commands and answers.
    (Store, Seq, SeqCst, Relaxed, Fails(Commands, Race)),
    (
        Store,
        Seq,
        SeqCst,
        Release,
        Harmless(&[Commands, Events], "a wake-up is a full barrier"),
    ),
    (Load, Seq, Acquire, Relaxed, Fails(Commands, Race)),
    (Store, Done, Release, Relaxed, Fails(Commands, Race)),
    (Load, Done, Acquire, Relaxed, Fails(Commands, Race)),
    (Load, Agent, Acquire, Relaxed, Fails(Death(2), Race)),
    (StoreOf(1), Ready, Release, Relaxed, Fails(Start, Race)),
    (Load, Ready, Acquire, Relaxed, Fails(Start, Race)),
    // Reader and agent.
    (
        StoreOf(1),
        ReaderWants,
        SeqCst,
        Release,
        Fails(Events, Race),
    ),
    (Load, Busy, SeqCst, Acquire, Fails(Events, Race)),
    (StoreOf(1), Busy, SeqCst, Release, Fails(Events, Race)),
    (Load, ReaderWants, SeqCst, Acquire, Fails(Events, Race)),
    (StoreOf(0), Busy, SeqCst, Release, Fails(Events, Hang)),
    (StoreOf(0), Busy, SeqCst, Relaxed, Fails(Events, Race)),
    (
        StoreOf(0),
        ReaderWants,
        Release,
        Relaxed,
        Fails(Events, Race),
    ),
    (
        StoreOf(2),
        ReaderWants,
        SeqCst,
        Release,
        Harmless(
            &[Events, Death(1)],
            "a thread that goes to sleep reads it again, behind a barrier",
        ),
    ),
    (
        Load,
        ReaderWants,
        Acquire,
        Relaxed,
        Harmless(
            &[Events],
            "it is loaded again, in order, before the agent moves",
        ),
    ),
    (
        Store,
        Cancelled,
        Release,
        Relaxed,
        Harmless(&[Events], "used in turn: the exclusion orders it"),
    ),
    (
        Load,
        Cancelled,
        Acquire,
        Relaxed,
        Harmless(&[Events], "used in turn: the exclusion orders it"),
    ),
    // The fork gate.
    (AddOf(1), InHand, SeqCst, AcqRel, Fails(Fork, Race)),
    (AddOf(1), InHand, SeqCst, Relaxed, Fails(Fork, Race)),
    (Load, Forking, SeqCst, Acquire, Fails(Fork, Race)),
    (Add, Forking, SeqCst, AcqRel, Fails(Fork, Race)),
    (Add, Forking, SeqCst, Relaxed, Fails(Fork, Race)),
    (Load, InHand, SeqCst, Acquire, Fails(Fork, Race)),
    (Load, InHand, SeqCst, Relaxed, Fails(Fork, Race)),
    (AddOf(u32::MAX), InHand, SeqCst, AcqRel, Fails(Fork, Hang)),
    (AddOf(u32::MAX), InHand, SeqCst, Relaxed, Fails(Fork, Race)),
    // Memory that is given back.
    (Store, Told, Release, Relaxed, Fails(GivesBack, Race)),
    (Load, Told, Acquire, Relaxed, Fails(GivesBack, Race)),
    (Store, Heard, Release, Relaxed, Fails(GivesBack, Race)),
    (Load, Heard, Acquire, Relaxed, Fails(GivesBack, Race)),
];

#[test]
fn the_protocol_holds() {
    let mut made = Vec::new();
    for scene in scenes::ALL {
        let (outcome, accesses) = scene.run(Broken::Nothing, Variant::AsItIs);
        println!("{scene:?}: {outcome:?}");
        assert!(matches!(outcome, Held(_)), "{scene:?}: {outcome:?}");
        made.extend(accesses);
    }
    made.retain(|(_, _, order)| *order != Relaxed);
    let listed = |(access, word, order)| {
        ORDERS
            .iter()
            .any(|(a, w, from, ..)| (*a, *w, *from) == (access, word, order))
    };
    for access in made.iter().copied() {
        assert!(
            listed(access),
            "{access:?} is not in the table of what can be broken"
        );
    }
    for (access, word, from, ..) in &ORDERS {
        assert!(
            made.contains(&(*access, *word, *from)),
            "no scene has {access:?} of {word:?}, {from:?}"
        );
    }
}

#[test]
fn every_weaker_order_is_found_or_harmless() {
    for (access, word, from, to, weaker) in &ORDERS {
        let broken = Broken::Order(*access, *word, *from, *to);
        match weaker {
            Fails(scene, outcome) => {
                let (found, _) = scene.run(broken, Variant::AsItIs);
                assert_eq!(found, *outcome, "{scene:?} with {broken:?}");
            }
            Harmless(scenes, reason) => {
                for scene in *scenes {
                    let found = scene.run_briefly(broken);
                    assert!(matches!(found, Held(_)), "{broken:?}, {reason}: {found:?}");
                }
            }
        }
    }
}

#[test]
fn every_missing_wake_up_is_found() {
    let scenes = [
        (Seq, Commands),
        (Done, Commands),
        (Busy, Events),
        (InHand, Fork),
        (Ready, Start),
        (Told, GivesBack),
        (Heard, GivesBack),
    ];
    for (word, scene) in scenes {
        let (found, _) = scene.run(Broken::Wake(word), Variant::AsItIs);
        assert_eq!(
            found, Hang,
            "{scene:?} without waking the sleeper on {word:?}"
        );
    }
}

#[test]
fn every_wrong_step_is_found() {
    let variants = [
        (Variant::CancelledSeenEarly, Events, "moved after the event"),
        (Variant::LooksThenSets, Events, "race"),
        (Variant::AdmitsEarly, Events, "race"),
        (Variant::ExcludesNobody, Events, "race"),
        (Variant::PostsUnlocked, Events, "race"),
        (Variant::ReleasesEarly, Fork, "race"),
        (Variant::ClaimLooksThenSets, Fork, "race"),
        (Variant::ForkLooksThenSets, Fork, "race"),
        (
            Variant::PostsUnclaimed,
            Late,
            "carried out after it was given up",
        ),
        (
            Variant::SettlesEarly,
            GivenUp,
            "the result is of another command",
        ),
        (Variant::ReleasesGivenUp, GivenUpInFork, "race"),
        (Variant::ReadsAnyway, LeftUnread, "race"),
    ];
    for (variant, scene, why) in variants {
        let (found, _) = scene.run(Broken::Nothing, variant);
        let found_that = match &found {
            Race => why == "race",
            Wrong(text) => text.contains(why),
            _ => false,
        };
        assert!(found_that, "{scene:?} with {variant:?}: {found:?}");
    }
}
