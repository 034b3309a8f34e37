//! `undercroft top`: shows the running programs on the terminal until the user leaves.

mod columns;
mod draw;
mod list;

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use undercroft_proto::report::Snapshot;

pub(crate) use self::list::Order;
use self::list::{List, Mode};
use crate::live;
use undercroft_terminal::{Failure, status};

/// How long a key may wait until the picture changes.
const KEY_PATIENCE: Duration = Duration::from_millis(100);

/// Shows the runs until the user leaves, or a signal asks for it.
///
/// * `all`: the runs of other users, too.
pub(crate) fn top(interval: Duration, order: Order, all: bool) -> Result<u8, Failure> {
    live::check_all(all)?;
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(Failure::new(
            status::FAILED,
            "`top` needs a terminal",
            "standard input or output is none",
            "`undercroft status --json` prints the same figures once",
        ));
    }
    let ends = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&ends)).map_err(no_terminal)?;
    }
    // The terminal is gone: there is nothing to restore, and waiting for a key would never end.
    let at_once = Arc::new(AtomicBool::new(true));
    signal_hook::flag::register_conditional_shutdown(SIGHUP, 128 + SIGHUP, at_once)
        .map_err(no_terminal)?;
    let news = ask_again_and_again(interval, all);
    let mut terminal = ratatui::try_init().map_err(no_terminal)?;
    let shown = show(&mut terminal, &news, List::new(order), &ends);
    ratatui::restore();
    shown.map_err(no_terminal)?;
    Ok(0)
}

fn no_terminal(error: std::io::Error) -> Failure {
    Failure::new(
        status::FAILED,
        "cannot show the runs",
        error.to_string(),
        "`undercroft status` prints them once",
    )
}

/// The state of all runs, and when it was asked for.
type News = (Instant, Vec<Snapshot>);

/// Asks on a thread of its own, because a run may take seconds to answer. The thread ends with the
/// process.
fn ask_again_and_again(interval: Duration, all: bool) -> Receiver<News> {
    let (tell, hear): (Sender<News>, _) = mpsc::channel();
    std::thread::spawn(move || {
        loop {
            let began = Instant::now();
            let Ok(snapshots) = live::snapshots_of(all) else {
                return;
            };
            if tell.send((began, snapshots)).is_err() {
                return;
            }
            std::thread::sleep(interval.saturating_sub(began.elapsed()));
        }
    });
    hear
}

fn show(
    terminal: &mut ratatui::DefaultTerminal,
    news: &Receiver<News>,
    mut list: List,
    ends: &AtomicBool,
) -> std::io::Result<()> {
    let mut is_old = true;
    while !ends.load(Ordering::Relaxed) {
        match news.recv_timeout(Duration::ZERO) {
            Ok((at, snapshots)) => {
                list.update(at, snapshots);
                is_old = true;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        if std::mem::take(&mut is_old) {
            terminal.draw(|frame| draw::draw(frame, &mut list))?;
        }
        if event::poll(KEY_PATIENCE)? {
            is_old = true; // a key, or another size of the terminal
            if let Event::Key(key) = event::read()?
                && !take(&mut list, key)
            {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Does what a key says. Returns false if it says that the user leaves.
fn take(list: &mut List, key: KeyEvent) -> bool {
    if key.kind == KeyEventKind::Release {
        return true;
    }
    if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
        return false;
    }
    match list.mode {
        Mode::List => return take_command(list, key.code),
        Mode::Filter if key.modifiers.contains(KeyModifiers::CONTROL) => {}
        Mode::Filter => take_letter(list, key.code),
        Mode::Help => list.mode = Mode::List,
    }
    true
}

fn take_command(list: &mut List, key: KeyCode) -> bool {
    match key {
        KeyCode::Esc if !list.filter().is_empty() => list.set_filter(String::new()),
        KeyCode::Char('q') | KeyCode::Esc => return false,
        KeyCode::Down | KeyCode::Char('j') => list.select(1),
        KeyCode::Up | KeyCode::Char('k') => list.select(-1),
        KeyCode::Char('r') => list.reverse(),
        KeyCode::Char(' ') => list.hold(),
        KeyCode::Char('/') => list.mode = Mode::Filter,
        KeyCode::Char('h' | '?') => list.mode = Mode::Help,
        KeyCode::Char(letter) => {
            if let Some(order) = Order::of_key(letter) {
                list.sort_by(order);
            }
        }
        _ => {}
    }
    true
}

/// Longest text of a filter.
const FILTER_LETTERS_MAX: usize = 40;

fn take_letter(list: &mut List, key: KeyCode) {
    let mut text = list.filter().to_owned();
    match key {
        KeyCode::Enter => list.mode = Mode::List,
        KeyCode::Esc => {
            list.mode = Mode::List;
            list.set_filter(String::new());
        }
        KeyCode::Down => list.select(1),
        KeyCode::Up => list.select(-1),
        KeyCode::Backspace => {
            text.pop();
            list.set_filter(text);
        }
        KeyCode::Char(letter) if text.chars().count() < FILTER_LETTERS_MAX => {
            text.push(letter);
            list.set_filter(text);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_go_into_the_filter_until_enter_and_escape_drops_it_before_it_leaves() {
        let mut list = List::new(Order::Faults);
        let press = |list: &mut List, key| take(list, KeyEvent::new(key, KeyModifiers::NONE));
        for letter in "/qr".chars() {
            assert!(press(&mut list, KeyCode::Char(letter)));
        }
        assert!(press(&mut list, KeyCode::Backspace));
        assert_eq!((list.filter(), list.mode), ("q", Mode::Filter));
        assert!(press(&mut list, KeyCode::Enter));
        assert_eq!((list.filter(), list.mode), ("q", Mode::List));
        assert!(press(&mut list, KeyCode::Char('?')));
        assert_eq!(list.mode, Mode::Help);
        assert!(press(&mut list, KeyCode::Char('q')), "puts the help away");
        assert!(press(&mut list, KeyCode::Esc), "drops the filter");
        assert_eq!((list.filter(), list.mode), ("", Mode::List));
        assert!(!press(&mut list, KeyCode::Esc));
    }
}
