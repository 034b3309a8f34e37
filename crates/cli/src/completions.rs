//! Completion scripts: those that clap makes, with names of policies and tiers, files of policies,
//! process ids of the runs, and after `run --` and `vm --` what the shell completes of a program.

use std::fmt::Write as _;
use std::io::{self, Write};

use clap::builder::PossibleValuesParser;
use clap::{Arg, Command, ValueHint};
use clap_complete::Shell;
use undercroft_policy::{place, prefetch, reclaim};
use undercroft_terminal::Failure;
use undercroft_tier::spec::KINDS;

use crate::{live, show};

/// Stands in clap's script for the process ids.
const PIDS: &str = "@PIDS@";

/// Stands in our part of zsh's script for the names of policies.
const POLICIES: &str = "@POLICIES@";

/// Prints the script of a shell.
pub(crate) fn print(command: Command, shell: Shell) -> Result<u8, Failure> {
    let _ = io::stdout().write_all(script(command, shell).as_bytes()); // a pipe may be closed
    Ok(0)
}

/// Prints process id and command of each run, with a tab between them, and the same of its name:
/// the scripts ask for it.
pub(crate) fn pids() -> Result<u8, Failure> {
    for run in live::snapshots()? {
        let names = [Some(run.pid.to_string()), run.name.clone()];
        for name in names.iter().flatten() {
            show::line(&format!("{name}\t{}", run.command_line()))?;
        }
    }
    Ok(0)
}

fn script(command: Command, shell: Shell) -> String {
    let mut command = named(visible(&command));
    let mut bytes = Vec::new();
    clap_complete::generate(shell, &mut command, "undercroft", &mut bytes);
    let text = String::from_utf8_lossy(&bytes);
    match shell {
        Shell::Bash => {
            let pids = "$(undercroft pids 2>/dev/null | cut -f1)";
            let text = text.replace(PIDS, pids);
            text.replace("complete -F _undercroft ", "complete -F _undercroft_all ") + BASH
        }
        Shell::Zsh => {
            let text = text.replace(&format!("({PIDS})"), "_undercroft_pids");
            let names = reclaim::NAMES.join(" ");
            let text = text.replace(&format!(":({names})"), ":_undercroft_policies");
            let own = ZSH.replace(POLICIES, &names);
            text.replacen("\n\n", &format!("\n\n{own}"), 1)
        }
        Shell::Fish => {
            let pids = text.replace(&format!("{PIDS}\\t''"), "(undercroft pids)");
            let mut text = pids + FISH;
            fish_pids(&command, "", &mut text);
            text
        }
        _ => text.replace(PIDS, ""),
    }
}

/// The command without the subcommands that are not for people.
fn visible(command: &Command) -> Command {
    let bare = Command::new("undercroft").version(env!("UNDERCROFT_VERSION"));
    let bare = bare.args(command.get_arguments().cloned());
    let inner = command
        .get_subcommands()
        .filter(|inner| !inner.is_hide_set());
    bare.subcommands(inner.cloned())
}

/// The command with the values that clap cannot know.
fn named(command: Command) -> Command {
    let command = command.mut_args(|arg| match arg.get_id().as_str() {
        "run" | "runs" => values(arg, [PIDS]),
        "reclaim" => values(arg, reclaim::NAMES.iter().copied()),
        "prefetch" => values(arg, prefetch::NAMES.iter().copied()),
        "placement" => values(arg, place::NAMES.iter().copied()),
        "tiers" | "measure" => values(arg, tiers()),
        _ if arg.is_trailing_var_arg_set() => arg.value_hint(ValueHint::CommandWithArguments),
        _ => arg,
    });
    command.mut_subcommands(named)
}

fn values(arg: Arg, names: impl IntoIterator<Item = &'static str>) -> Arg {
    arg.value_parser(PossibleValuesParser::new(names))
}

/// Beginnings of tiers: `ram`, `file:`.
fn tiers() -> impl Iterator<Item = &'static str> {
    let named = KINDS.iter().filter(|row| !row.facts.is_source);
    named.map(|row| {
        let end = row.facts.kind.len();
        let colon = usize::from(row.syntax[end..].starts_with(':'));
        &row.syntax[..end + colon]
    })
}

/// After `run --`, `vm --` and `view --` comes another command. A policy is a name or a file.
const BASH: &str = r#"
_undercroft_all() {
    local at
    for ((at = 2; at < COMP_CWORD; at++)); do
        if [[ ${COMP_WORDS[1]} == @(run|vm|view) && ${COMP_WORDS[at]} == -- ]]; then
            COMPREPLY=()
            if declare -F _command_offset >/dev/null; then
                _command_offset $((at + 1))
            elif ((COMP_CWORD == at + 1)); then
                COMPREPLY=($(compgen -c -- "${COMP_WORDS[COMP_CWORD]}"))
            fi
            return 0
        fi
    done
    _undercroft "$@"
    if [[ ${COMP_WORDS[COMP_CWORD-1]} == --policy ]]; then
        local word=${COMP_WORDS[COMP_CWORD]} IFS=$'\n'
        COMPREPLY+=($(compgen -f -X '!*.wasm' -- "$word") $(compgen -d -- "$word"))
        compopt -o filenames 2>/dev/null
    fi
}
"#;

const ZSH: &str = r#"_undercroft_policies() {
    _alternative 'names:policy:(@POLICIES@)' 'files:file of a policy:_files -g "*.wasm"'
}

_undercroft_pids() {
    local -a runs=(${${(f)"$(undercroft pids 2>/dev/null)"}//:/\\:})
    runs=(${runs/$'\t'/:})
    _describe -t pids 'run' runs
}

"#;

const FISH: &str = r#"
function __fish_undercroft_policy_files
    set -l word (string replace -r '^--[^=]*=' '' -- (commandline -ct))
    __fish_complete_path "$word" | string match -r '.*(?:/|\.wasm)(?:\t.*)?$'
end
complete -c undercroft -n "__fish_undercroft_using_subcommand run vm" -l policy \
    -r -f -a "(__fish_undercroft_policy_files)"

function __fish_undercroft_program
    set -l at (contains -i -- -- (commandline -opc))
    __fish_complete_subcommand --fcs-skip=$at
end
complete -c undercroft -n "__fish_undercroft_using_subcommand run vm view; and contains -- -- (commandline -opc)" \
    -f -a "(__fish_undercroft_program)"
"#;

/// clap's script for fish has options alone.
fn fish_pids(command: &Command, path: &str, text: &mut String) {
    for inner in command.get_subcommands() {
        let name = inner.get_name();
        let condition = match path {
            "" => format!("__fish_undercroft_using_subcommand {name}"),
            above => format!("{above}; and __fish_seen_subcommand_from {name}"),
        };
        let is_pids = |arg: &Arg| {
            let known = arg.get_possible_values();
            arg.is_positional() && known.iter().any(|value| value.get_name() == PIDS)
        };
        if inner.get_positionals().any(is_pids) {
            let _ = writeln!(
                text,
                "complete -c undercroft -n \"{condition}\" -f -a \"(undercroft pids)\""
            );
        }
        fish_pids(inner, &condition, text);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command as Process;

    use clap::CommandFactory;

    use super::*;

    /// A directory with the script, a file of a policy, and a program `undercroft` that knows two
    /// runs.
    fn folder(shell: Shell) -> tempfile::TempDir {
        use std::os::unix::fs::PermissionsExt;

        let folder = tempfile::tempdir().expect("a scratch folder");
        let script = script(crate::args::Cli::command(), shell);
        assert!(!script.contains(PIDS));
        // Hidden.
        assert!(!script.contains("demo-kv"));
        std::fs::write(folder.path().join("script"), script).expect("a script");
        std::fs::write(folder.path().join("mine.wasm"), "").expect("a file");
        let program = folder.path().join("undercroft");
        let text =
            "#!/bin/sh\n[ \"$1\" = pids ] && printf '4711\\tredis-server\\n4812\\tsh -c a:b\\n'\n";
        std::fs::write(&program, text).expect("a program");
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&program, mode).expect("ours");
        folder
    }

    /// Output of a shell's script; `None`: the shell is not installed, which is said.
    fn asked(shell: Shell, text: &str) -> Option<String> {
        let folder = folder(shell);
        let path = std::env::var("PATH").expect("a path");
        let output = Process::new(shell.to_string())
            .args(["-c", text])
            .env("PATH", format!("{}:{path}", folder.path().display()))
            .current_dir(folder.path())
            .output();
        match output {
            Ok(output) => Some(String::from_utf8_lossy(&output.stdout).into_owned()),
            Err(_) => {
                crate::skip(&format!("completions: no {shell}"));
                None
            }
        }
    }

    /// Values that each shell offers after these words.
    const OFFERED: [(&str, &[&str]); 8] = [
        ("set ", &["4711", "4812"]),
        ("status 48", &["4812"]),
        ("tiers drain ", &["4711", "4812"]),
        ("run --policy ", &["auto", "lru", "mine.wasm"]),
        ("run --placement w", &["worth", "waterfall"]),
        ("run --tier ", &["ram", "file"]),
        ("run -m 1G -- undercr", &["undercroft"]),
        ("vm -m 1G -- undercr", &["undercroft"]),
    ];

    #[test]
    fn bash_offers_names_and_process_ids() {
        for (words, expected) in OFFERED {
            let text = format!(
                "source ./script; words='undercroft {words}'; COMP_WORDS=($words); \
                 [[ $words == *' ' ]] && COMP_WORDS+=(''); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
                 _undercroft_all undercroft \"${{COMP_WORDS[COMP_CWORD]}}\" \
                 \"${{COMP_WORDS[COMP_CWORD-1]}}\"; printf '%s\\n' \"${{COMPREPLY[@]}}\""
            );
            let Some(offered) = asked(Shell::Bash, &text) else {
                return;
            };
            for word in expected {
                assert!(offered.contains(word), "{words}: {offered}");
            }
            assert!(!words.contains("--") || !offered.contains("--memory-max"));
            assert!(!words.contains("--policy") || !offered.contains("script"));
        }
    }

    #[test]
    fn fish_offers_names_and_process_ids() {
        for (words, expected) in OFFERED {
            let text = format!("source ./script; complete -C 'undercroft {words}'");
            let Some(offered) = asked(Shell::Fish, &text) else {
                return;
            };
            for word in expected {
                assert!(offered.contains(word), "{words}: {offered}");
            }
            assert!(!words.contains("--policy") || !offered.contains("script"));
        }
    }

    /// zsh completes on a terminal alone; the words are looked for in the script.
    #[test]
    fn zsh_offers_names_and_process_ids() {
        let parsed = "zsh -n ./script && echo parsed; source ./script 2>/dev/null; \
                      _describe() { print -rl -- \"${(P@)4}\" }; _undercroft_pids";
        let Some(text) = asked(Shell::Zsh, parsed) else {
            return;
        };
        for part in ["parsed", "4711:redis-server", "4812:sh -c a\\:b"] {
            assert!(text.contains(part), "{text}");
        }
        let script = script(crate::args::Cli::command(), Shell::Zsh);
        for part in [
            ":NAME|FILE.wasm:_undercroft_policies",
            "(auto active_inactive",
            ":SPEC:(ram ",
            "or its program, such as redis-server:_undercroft_pids",
            ":_cmdambivalent",
        ] {
            assert!(script.contains(part), "no {part}");
        }
    }
}
