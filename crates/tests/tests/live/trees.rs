//! Process trees under one limit: shells with background jobs, exec chains, forking workers,
//! threads, dropped users.

use undercroft_tests::{Job, MIB, beside_others, build, find, plain_only, rounds, skip};

const LIMIT: u64 = 24 * MIB;

/// Runs `job` plain and limited: status 0, the same output, and something was swapped.
fn same(job: Job, limit: u64, pages: f64) {
    let _turn = beside_others();
    let plain = job.run().expect(0);
    let limited = job.limit(limit).run().expect(0);
    assert_eq!(limited.text(), plain.text(), "{limited}");
    limited.expect_swapping(pages);
}

fn touch() -> String {
    build("touch").display().to_string()
}

#[test]
fn background_jobs_of_a_shell_share_the_limit() {
    let touch = touch();
    let script = format!("{touch} 24 --rounds 2 & {touch} 24 --rounds 2 & wait; echo done");
    same(Job::new("sh").args(["-c", &script]), LIMIT, 1000.0);
}

/// The first fault in the memory of such a child is not its own.
fn others_read_first(more: &[&str]) {
    let _turn = beside_others();
    let job = Job::new(build("readers")).args(["48", "12"]).args(more);
    let job = if plain_only() {
        job
    } else {
        job.limit(16 * MIB).tier("ram")
    };
    let outcome = job.run().expect(0);
    if !plain_only() {
        outcome.expect_swapping(2000.0);
    }
}

#[test]
fn whoever_reads_a_fork_child_first_is_not_taken_for_it() {
    others_read_first(&[]);
}

#[test]
fn a_child_that_is_not_its_parents_child_is_found_when_others_read_it_first() {
    others_read_first(&["brothers"]);
}

#[test]
fn a_child_whose_parent_has_ended_is_found_when_others_read_it_first() {
    others_read_first(&["orphans"]);
}

#[test]
fn status_of_a_background_job_is_right() {
    let _turn = beside_others();
    let touch = touch();
    let script =
        format!("{touch} 40 --rounds 1 --exit 9 & first=$!; {touch} 8 & wait $first; exit $?");
    Job::new("sh")
        .args(["-c", &script])
        .limit(LIMIT)
        .run()
        .expect(9);
}

/// Several children at once rewrite all they inherited, while parent and children are evicted from.
#[test]
fn a_storm_of_forks_reads_what_it_wrote() {
    same(
        Job::new(build("forks")).args(["40", rounds("3", "4"), "3"]),
        64 * MIB,
        1000.0,
    );
}

/// The texts of /proc then have bytes that are not UTF-8, in the process and in its fork child.
#[test]
fn names_of_any_bytes_hide_no_memory() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let job = Job::new(build("names")).args(["40"]).folder(folder.path());
    same(job, 16 * MIB, 20_000.0);
}

#[test]
fn exec_chain_forgets_the_old_memory() {
    let touch = touch();
    // Each step holds memory and is then replaced by exec: by a shell, then by the program.
    let last = format!("exec {touch} 48 --rounds 2");
    let script =
        format!("{touch} 32; x=$(head -c 3000000 /dev/zero | tr '\\0' y); exec sh -c '{last}'");
    same(Job::new("sh").args(["-c", &script]), LIMIT, 1000.0);
}

#[test]
fn pipelines_pass_evicted_bytes() {
    let script = "seq 1 400000 | sort -r -S 64M | sort -n -S 64M | md5sum";
    same(Job::new("sh").args(["-c", script]), 16 * MIB, 500.0);
}

#[test]
fn fork_children_and_their_parent_see_their_own_bytes() {
    same(
        Job::new(touch()).args(["64", "--rounds", "1", "--fork", "4"]),
        LIMIT,
        4000.0,
    );
}

#[test]
fn python_workers_made_by_fork_agree_with_a_plain_run() {
    let Some(python) = find("python3") else {
        return skip("no python3; on Debian: apt-get install python3");
    };
    let script = r#"
import hashlib, multiprocessing
data = [hashlib.sha256(str(i).encode()).hexdigest() * 8 for i in range(60000)]
def work(part):
    mine = [text[::-1] for text in data[part::6]]
    return hashlib.sha256("".join(mine).encode()).hexdigest()
if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    with multiprocessing.Pool(3) as pool:
        print(*pool.map(work, range(6)), sep="\n")
    print(hashlib.sha256("".join(data).encode()).hexdigest())
"#;
    let job = Job::new(python).args(["-c", script]);
    same(job, 20 * MIB, 1000.0);
}

#[test]
fn program_with_many_threads_is_identical() {
    let job = Job::new(build("threads")).args(["32", rounds("2", "3")]);
    same(job, 16 * MIB, 2000.0);
}

#[test]
fn program_that_becomes_another_user_keeps_its_memory() {
    if !rustix::process::geteuid().is_root() || find("setpriv").is_none() {
        return skip("needs root and setpriv");
    }
    if plain_only() {
        skip("only plain: UNDERCROFT_TEST_PLAIN is set");
    }
    let folder = tempfile::Builder::new()
        .prefix("undercroft-tests-")
        .tempdir_in("/tmp")
        .expect("a scratch folder");
    let program = folder.path().join("touch");
    std::fs::copy(build("touch"), &program).expect("a copy of the program");
    let everyone = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), everyone).expect("a mode");
    let job = Job::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&program)
        .args(["48", "--rounds", "2", "--fork", "1"])
        .folder("/");
    same(job, LIMIT, 1000.0);
}

#[test]
fn threads_that_end_are_joined() {
    let joins = build("joins").display().to_string();
    same(Job::new(joins).args(["2000", "48"]), 16 * MIB, 1000.0);
}

/// Table entries change while the agent moves pages, and the kernel does not report all that it
/// moved.
#[test]
fn pages_that_a_move_forgot_are_found() {
    let restless = build("restless").display().to_string();
    same(
        Job::new(restless).args([rounds("40", "64"), "4"]),
        8 * MIB,
        1000.0,
    );
}
