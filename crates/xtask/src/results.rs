//! `cargo xtask results`: what the folders of `docs/results` measured, and how a run is added.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::tidy::root;

/// Files of a run that are kept: the values, the table, the plots.
const KEPT: [&str; 3] = ["json", "md", "svg"];

/// Every figure that has a bound, from the newest run, as rows of a Markdown table.
pub(crate) fn print() -> Result<String, String> {
    let folder = root().join("docs/results");
    let mut out = String::from(
        "| run | commit | case | measure | against | ratio | must | aim | reached |\n",
    );
    out.push_str("|---|---|---|---|---|--:|--:|--:|---|\n");
    let mut names: Vec<_> = fs::read_dir(&folder)
        .map_err(|error| format!("{}: {error}", folder.display()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.join("results.json").is_file())
        .collect();
    names.sort();
    for path in names {
        rows(&path, &mut out)?;
    }
    Ok(out)
}

/// Copies the run in `from` in place of the one of the same name. Leaves out files that are not
/// kept.
pub(crate) fn add(from: &str, name: Option<&str>) -> Result<String, String> {
    let from = Path::new(from);
    let own = from
        .file_name()
        .map(|name| name.to_string_lossy().into_owned());
    let name = name.map(str::to_owned).or(own).ok_or("a name is missing")?;
    if !from.join("results.json").is_file() {
        return Err(format!("{}: no results.json in it", from.display()));
    }
    let to = root().join("docs/results").join(&name);
    let failed = |error: std::io::Error| format!("{}: {error}", to.display());
    if to.exists() {
        fs::remove_dir_all(&to).map_err(failed)?;
    }
    fs::create_dir_all(&to).map_err(failed)?;
    let mut copied = 0;
    for entry in fs::read_dir(from).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let kept = path
            .extension()
            .is_some_and(|e| KEPT.iter().any(|k| e == *k));
        if let Some(name) = path.file_name().filter(|_| kept) {
            fs::copy(&path, to.join(name)).map_err(failed)?;
            copied += 1;
        }
    }
    Ok(format!("{copied} files in docs/results/{name}\n"))
}

fn rows(run: &Path, out: &mut String) -> Result<(), String> {
    let path = run.join("results.json");
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let value: Value =
        serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
    let name = run.file_name().unwrap_or_default().to_string_lossy();
    let commit = value["commit"].as_str().unwrap_or("?");
    let short = &commit[..commit.len().min(7)];
    for row in value["rows"].as_array().into_iter().flatten() {
        let target = &row["target"];
        if target["must"].is_null() {
            continue;
        }
        let number = |value: &Value| value.as_f64().map_or("?".to_owned(), |n| format!("{n:.3}"));
        let word = |key: &str| row[key].as_str().unwrap_or_default();
        let reached = match (&row["must_reached"], &row["aim_reached"]) {
            (_, Value::Bool(true)) => "aim",
            (Value::Bool(true), _) => "must",
            _ => "**no**",
        };
        let _ = writeln!(
            out,
            "| {name} | {short} | {} | {} | {} | {} | {} | {} | {reached} |",
            word("case"),
            word("metric"),
            word("baseline"),
            number(&row["ratio"]),
            number(&target["must"]),
            number(&target["aim"]),
        );
    }
    Ok(())
}
