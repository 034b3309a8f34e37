//! The reclaim rules of the PCM paper as policy files: what they do to a program.

use undercroft_tests::{has_access_bits, one_at_a_time, say};

use crate::access_bits::{HOT_MIB, hot_faults, resting_job};
use crate::flexswap::{count, policy, text};

/// Pages that are used, and written, at each step stay by the file. Where it hears of no scan they
/// leave once in each lap of the hand.
#[test]
fn a_hot_set_stays_in_memory_by_clock_and_clock_w_as_files() {
    if !has_access_bits() {
        return;
    }
    let _turn = one_at_a_time();
    let folder = tempfile::tempdir().expect("a scratch folder");
    for name in ["clock", "clock_w"] {
        let Some(file) = policy(name, folder.path()) else {
            return;
        };
        let job =
            |scan| resting_job(text(&file), folder.path(), "4000").options(["--access-scan", scan]);
        let (without, _) = hot_faults(job("never"));
        let (with, report) = hot_faults(job("auto"));
        say(&format!(
            "{name}: {without} faults of the hot set if the file hears of no scan, {with} if it \
             does: {}",
            report["policies"]["plugin"]
        ));
        assert!(without > 2.0 * (HOT_MIB * 256) as f64, "{without}");
        assert!(with < without / 2.0, "{with} of {without}");
        let [chosen, left] =
            ["/policies/plugin/pages_chosen", "/pages/swapped_out"].map(|of| count(&report, of));
        assert!(chosen > left / 2, "{chosen} of {left}: {report}");
    }
}
