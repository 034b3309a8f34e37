//! When the manager dies, another takes over. The keeper starts it, and gives up if managers die
//! again and again. An upgrade is the same, of a manager that the keeper ends itself.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use undercroft_proto::legacy::Legacy;
use undercroft_proto::options::RunOptions;
use undercroft_proto::report::{TakenOver, Takeovers};
use undercroft_sys::mapping::SharedMemory;
use undercroft_sys::process::PidFd;
use undercroft_tier::spec::TierSpec;

use super::estate::{Estate, Failed};
use super::left::reap_one;
use super::upgrade::{self, Asking, Told};
use super::voice::Voice;
use super::{DYING, Killed, Manager, READY};

/// Managers in a row that may die without serving a fault; and managers in a row that may die while
/// they serve the same page.
const DEATHS_MAX: usize = 4;

/// A manager that lives longer than this has not died of the takeover.
const SOON: Duration = Duration::from_secs(5);

/// How long a binary is on trial after an upgrade. If its manager dies by then, the one before
/// takes over again.
const TRIAL: Duration = Duration::from_secs(30);

/// The takeovers of one run.
pub(super) struct Succession {
    left: u32,
    /// Of the managers that took over, those of a binary that a user gave.
    upgrades: u64,
    /// The binary before the last upgrade, and when that was.
    before: Option<(OwnedFd, Instant)>,
    /// A trace cannot be continued.
    traces: bool,
    quiet: bool,
    /// Managers that died in a row without serving.
    idle_deaths: usize,
    /// Pages that all of the last managers served when they died, and how many managers that were.
    fatal: (Vec<u64>, usize),
    pauses: Vec<Duration>,
}

impl Succession {
    pub(super) fn new(options: &RunOptions) -> Succession {
        Succession {
            left: options.client.takeovers_max,
            upgrades: 0,
            before: None,
            traces: options.client.trace.is_some(),
            quiet: options.client.quiet,
            idle_deaths: 0,
            fatal: (Vec::new(), 0),
            pauses: Vec::new(),
        }
    }

    /// The takeovers so far, for the report.
    pub(super) fn summary(&self) -> Takeovers {
        let mut pauses = self.pauses.clone();
        pauses.sort_unstable();
        let at = |part: f64| pauses.get((pauses.len() as f64 * part) as usize);
        let seconds = |pause: Option<&Duration>| pause.map_or(0.0, Duration::as_secs_f64);
        Takeovers {
            count: pauses.len() as u64,
            upgrades: self.upgrades,
            pause_seconds_p50: seconds(at(0.5)),
            pause_seconds_p99: seconds(at(0.99)),
            pause_seconds_max: seconds(pauses.last()),
        }
    }

    /// Counts a takeover. The new manager tells it in its status.
    fn note_pause(&mut self, estate: &Estate, pause: Duration) {
        self.pauses.push(pause);
        let longest = self.pauses.iter().max().copied().unwrap_or_default();
        if let Some(legacy) = look(estate) {
            legacy.note_takeovers(TakenOver {
                count: self.pauses.len() as u64,
                upgrades: self.upgrades,
                pause_seconds_last: pause.as_secs_f64(),
                pause_seconds_max: longest.as_secs_f64(),
            });
        }
    }

    /// Replaces a dead manager by one that has taken over from it. Error: none has, and why, as the
    /// end of a sentence. The program has to be ended then.
    pub(super) fn go_on(
        &mut self,
        estate: &mut Estate,
        manager: &mut Manager,
        voice: &mut Voice,
    ) -> Result<(), String> {
        let died = Instant::now();
        if let Some((binary, since)) = self.before.take()
            && since.elapsed() < TRIAL
        {
            voice.say("the manager of the new binary died, so the one before takes over again");
            estate.binary = binary;
            self.left = self.left.saturating_add(1); // this one is not counted
        }
        self.may_go_on(estate, manager, voice)?;
        self.start_others(estate, manager, voice)?;
        self.note_pause(estate, died.elapsed());
        if !self.quiet {
            voice.say(&format!(
                "the manager died, and another took over: the program waited for {:.1?}",
                died.elapsed()
            ));
        }
        Ok(())
    }

    /// Replaces the manager by one of the binary that a user gave, if that can take over. If it
    /// proves that it cannot, the binary before takes over again. Error: none has, and why, as the
    /// end of a sentence. The program has to be ended then.
    pub(super) fn upgrade(
        &mut self,
        estate: &mut Estate,
        manager: &mut Manager,
        voice: &mut Voice,
        asking: &Asking,
    ) -> Result<(), String> {
        let (version, binary) = match self.checked(estate, manager, asking) {
            Ok(checked) => checked,
            Err(why) => {
                hold_tiers(estate, false);
                asking.tell(&Told::Refused { why });
                return Ok(());
            }
        };
        let pause = estate.pause();
        asking.tell(&Told::Checked {
            version: version.clone(),
            pause_seconds: pause.expected.as_secs_f64(),
            pause_seconds_max: pause.longest.as_secs_f64(),
        });
        let died = Instant::now();
        let replaced = self.replace(estate, manager, voice, binary);
        hold_tiers(estate, false);
        let pause = died.elapsed();
        let pause_seconds = pause.as_secs_f64();
        let (what, told) = match replaced {
            Ok(None) => {
                self.upgrades += 1;
                let what = format!("undercroft {version} manages now");
                (what, Told::Done { pause_seconds })
            }
            Ok(Some(why)) => {
                let what = "the new binary did not take over, so the one before did".to_owned();
                (what, Told::Kept { why, pause_seconds })
            }
            Err(why) => {
                asking.tell(&Told::Ended { why: died_of(&why) });
                return Err(why);
            }
        };
        self.note_pause(estate, pause);
        if !self.quiet {
            voice.say(&format!("{what}: the program waited for {pause:.1?}"));
        }
        asking.tell(&told);
        Ok(())
    }

    /// The version of the binary that a user gave, and the binary. Nothing is changed. Errors: it
    /// cannot take over, and why.
    fn checked(
        &self,
        estate: &Estate,
        manager: &Manager,
        asking: &Asking,
    ) -> Result<(String, OwnedFd), String> {
        let versions = upgrade::check(&asking.binary)?;
        hold_tiers(estate, true);
        self.may_replace(estate, manager)?;
        match asking.binary.try_clone() {
            Ok(binary) => Ok((versions.undercroft, binary)),
            Err(why) => Err(format!("no descriptor for it: {why}")),
        }
    }

    /// Ends the manager and starts one of `binary`. Returns why that one did not take over, if
    /// another of the binary before did. Error: none did.
    fn replace(
        &mut self,
        estate: &mut Estate,
        manager: &mut Manager,
        voice: &mut Voice,
        binary: OwnedFd,
    ) -> Result<Option<String>, String> {
        if manager.end_within(DYING, voice) == Killed::Stays {
            return Err(": it has not ended after it was killed for an upgrade".to_owned());
        }
        manager.log.tell(voice);
        let before = std::mem::replace(&mut estate.binary, binary);
        let why = match self.start_one(estate, manager) {
            Ok(Ok(())) => {
                self.before = Some((before, Instant::now()));
                return Ok(None);
            }
            Ok(Err(failed)) => self.clean_up(estate, manager, *failed, voice)?,
            Err(why) => Some(why),
        };
        estate.binary = before;
        self.start_others(estate, manager, voice)?;
        Ok(Some(why.unwrap_or_else(|| {
            "it ended before it was ready".to_owned()
        })))
    }

    /// Whether a manager that lives may be replaced. Nothing is changed. Errors: why not.
    fn may_replace(&self, estate: &Estate, manager: &Manager) -> Result<(), String> {
        if let Some(why) = self.cannot_ever(estate) {
            return Err(why);
        }
        if manager.stays || manager.holder.1.has_exited() || manager.handover.is_none() {
            return Err("its manager, or the holder of its descriptors, is ending".to_owned());
        }
        let legacy = look(estate).ok_or("its table of processes cannot be read")?;
        match legacy.refusal() {
            Some(why) => Err(format!("no manager can take over: {why}")),
            None => Ok(()),
        }
    }

    /// Starts managers until one has taken over.
    fn start_others(
        &mut self,
        estate: &Estate,
        manager: &mut Manager,
        voice: &mut Voice,
    ) -> Result<(), String> {
        loop {
            match self.start_one(estate, manager)? {
                Ok(()) => return Ok(()),
                Err(failed) => self.failed(estate, manager, *failed, voice)?,
            }
        }
    }

    /// Starts one manager. Outer error: none could start.
    fn start_one(
        &self,
        estate: &Estate,
        manager: &mut Manager,
    ) -> Result<Result<(), Box<Failed>>, String> {
        let Some(handover) = &manager.handover else {
            return Err(String::new()); // the program is being ended
        };
        let started = estate.spawn(Some(handover), manager.generation + 1);
        let started = started.map_err(|error| format!(": no other could start: {error}"))?;
        Ok(
            match started.until_ready(Instant::now() + estate.pause().longest) {
                Ok(new) => {
                    let old = std::mem::replace(manager, new);
                    end_holder(&old.holder); // the new one has its descriptors, too
                    Ok(())
                }
                Err(failed) => Err(failed),
            },
        )
    }

    /// Checks whether another manager may be started. Notes the death of this one.
    fn may_go_on(
        &mut self,
        estate: &Estate,
        manager: &mut Manager,
        voice: &mut Voice,
    ) -> Result<(), String> {
        if self.left == 0 {
            return Err(self.why_none(estate));
        }
        let most = if manager.holder.1.has_exited() {
            Duration::ZERO // no other can take over in any case
        } else {
            DYING
        };
        if manager.end_within(most, voice) == Killed::Stays {
            return Err(": it has not ended yet".to_owned());
        }
        manager.log.tell(voice);
        self.left -= 1;
        if manager.holder.1.has_exited() {
            return Err(": the holder of its descriptors (uc-fds) is dead, too".to_owned());
        }
        let legacy = look(estate).ok_or(": its table of processes cannot be read".to_owned())?;
        let idle = !legacy.has_served() && manager.ready.elapsed() < SOON;
        self.note_death(!idle, legacy.was_serving());
        self.gives_up()?;
        if self.fatal.1 >= DEATHS_MAX {
            return Err(format!(
                ": {DEATHS_MAX} managers in a row died while they served the same page"
            ));
        }
        Ok(())
    }

    /// Why none is left, as the end of a sentence.
    fn why_none(&self, estate: &Estate) -> String {
        if let Some(why) = self.cannot_ever(estate) {
            format!(": {why}")
        } else if estate.options().takeovers_max > 0 {
            ": others took over as often as --takeovers-max allows".to_owned()
        } else {
            String::new()
        }
    }

    /// The reason why no manager of this run can take over.
    fn cannot_ever(&self, estate: &Estate) -> Option<String> {
        if self.traces {
            return Some("no other manager can continue the trace of --trace".to_owned());
        }
        let mut kinds = estate.options().tiers.iter().map(TierSpec::kind);
        let lost = kinds.find(|kind| kind.version.is_none())?.facts.kind;
        Some(format!("no manager can take over a {lost} tier yet"))
    }

    fn gives_up(&self) -> Result<(), String> {
        if self.idle_deaths < DEATHS_MAX {
            return Ok(());
        }
        Err(format!(
            ": {DEATHS_MAX} managers in a row died before they served a fault"
        ))
    }

    /// Notes the death of a manager.
    /// * `serving`: the pages that it served.
    fn note_death(&mut self, served: bool, serving: Vec<u64>) {
        self.idle_deaths = if served { 0 } else { self.idle_deaths + 1 };
        let same = self.fatal.0.iter().copied();
        let same: Vec<u64> = same.filter(|at| serving.contains(at)).collect();
        self.fatal = if same.is_empty() {
            (serving, 1)
        } else {
            (same, self.fatal.1 + 1)
        };
    }

    /// A successor did not become ready. Error: it says why, or has not ended.
    fn failed(
        &mut self,
        estate: &Estate,
        manager: &mut Manager,
        failed: Failed,
        voice: &mut Voice,
    ) -> Result<(), String> {
        let why = self.clean_up(estate, manager, failed, voice)?;
        self.note_death(false, Vec::new());
        self.gives_up()?;
        match why {
            Some(why) => Err(format!(": {why}")),
            None => Ok(()),
        }
    }

    /// Ends a successor that did not become ready, so that another can be started. Returns what it
    /// said. Error: none can be started.
    fn clean_up(
        &self,
        estate: &Estate,
        manager: &mut Manager,
        failed: Failed,
        voice: &mut Voice,
    ) -> Result<Option<String>, String> {
        let (mut failed, why) = (failed.starting, failed.why);
        failed.kill(DYING);
        let killed = failed.end();
        failed.log.tell(voice);
        // If it has come so far that the descriptors are its own, its holder has them.
        let committed = look(estate).is_some_and(|legacy| legacy.generation() > manager.generation);
        if committed && failed.holder.is_none() {
            return Err(": the holder of another one's descriptors is not known".to_owned());
        }
        if let Some(holder) = failed.holder.take() {
            let spare = if committed {
                manager.handover = Some(failed.handover);
                manager.generation += 1;
                std::mem::replace(&mut manager.holder, holder)
            } else {
                holder
            };
            end_holder(&spare);
        }
        match killed {
            Killed::Stays => Err(": another one did not become ready".to_owned()),
            Killed::Ended => Ok(why),
        }
    }
}

/// The end of a sentence as a sentence.
fn died_of(why: &str) -> String {
    format!("no manager took over{why}")
}

/// Ends a holder whose descriptors another one has, too.
fn end_holder((pid, pidfd): &(u32, PidFd)) {
    let _ = pidfd.kill();
    pidfd.wait_exit(READY);
    reap_one(*pid);
}

/// Has the tiers stay those of now, or change again as users ask.
fn hold_tiers(estate: &Estate, hold: bool) {
    if let Some(legacy) = look(estate) {
        legacy.set_upgrades(hold);
    }
}

fn look(estate: &Estate) -> Option<Legacy> {
    let fd = estate.legacy.as_fd().try_clone_to_owned().ok()?;
    Legacy::open(SharedMemory::from_fd(fd).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn succession() -> Succession {
        Succession {
            left: 100,
            upgrades: 0,
            before: None,
            traces: false,
            quiet: true,
            idle_deaths: 0,
            fatal: (Vec::new(), 0),
            pauses: Vec::new(),
        }
    }

    #[test]
    fn a_page_that_kills_each_manager_is_found_among_others() {
        let mut deaths = succession();
        for other in [1, 2, 3, 4] {
            deaths.note_death(true, vec![other, 99]);
        }
        assert_eq!(deaths.fatal, (vec![99], 4));
        deaths.note_death(true, vec![5]);
        assert_eq!((deaths.fatal.1, deaths.idle_deaths), (1, 0));
        for _ in 0..DEATHS_MAX {
            deaths.note_death(false, vec![]);
        }
        assert_eq!(deaths.idle_deaths, DEATHS_MAX);
        deaths.note_death(true, vec![]);
        assert_eq!(deaths.idle_deaths, 0);
    }

    #[test]
    fn the_summary_has_the_longest_pause() {
        let mut deaths = succession();
        assert_eq!(deaths.summary().count, 0);
        deaths.pauses = [30, 10, 20].map(Duration::from_millis).to_vec();
        let summary = deaths.summary();
        assert_eq!((summary.count, summary.pause_seconds_max), (3, 0.03));
        assert_eq!(summary.pause_seconds_p50, 0.02);
    }
}
