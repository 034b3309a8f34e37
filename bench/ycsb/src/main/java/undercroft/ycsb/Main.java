package undercroft.ycsb;

import java.util.Arrays;

/** Entry point of the jar: {@code verify PORT RECORDS FIELDS LENGTH}, or YCSB's own client with any of its arguments. */
public final class Main {
  private Main() {}

  /** See the class. */
  public static void main(String[] args) {
    if (args.length == 5 && args[0].equals("verify")) {
      int[] numbers = Arrays.stream(args).skip(1).mapToInt(Integer::parseInt).toArray();
      System.exit(Verify.run(numbers[0], numbers[1], numbers[2], numbers[3]));
    }
    site.ycsb.Client.main(args);
  }
}
