package undercroft.ycsb;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.Vector;
import redis.clients.jedis.Jedis;
import redis.clients.jedis.exceptions.JedisException;
import site.ycsb.ByteIterator;
import site.ycsb.DB;
import site.ycsb.DBException;
import site.ycsb.Status;
import site.ycsb.StringByteIterator;

/**
 * YCSB's database interface on redis: one hash per record, one hash field per YCSB field.
 *
 * <p>No index is kept, so scans (workload E) are not supported. Values are stored inside a {@link Envelope} which repeats
 * key and field: a value that turns up under another record is found even where YCSB would not look. Properties:
 * {@code redis.host} (127.0.0.1), {@code redis.port} (required), {@code redis.timeout_ms} (60000).
 */
public class RedisClient extends DB {
  private Jedis jedis;

  @Override
  public void init() throws DBException {
    String port = getProperties().getProperty("redis.port");
    if (port == null) {
      throw new DBException("property redis.port is missing");
    }
    String host = getProperties().getProperty("redis.host", "127.0.0.1");
    int timeout = Integer.parseInt(getProperties().getProperty("redis.timeout_ms", "60000"));
    jedis = new Jedis(host, Integer.parseInt(port), timeout);
    jedis.connect();
  }

  @Override
  public void cleanup() {
    jedis.close();
  }

  @Override
  public Status read(String table, String key, Set<String> fields, Map<String, ByteIterator> result) {
    try {
      if (fields == null) {
        Map<byte[], byte[]> all = jedis.hgetAll(bytes(key));
        if (all.isEmpty()) {
          return Status.NOT_FOUND;
        }
        for (Map.Entry<byte[], byte[]> entry : all.entrySet()) {
          String field = new String(entry.getKey(), StandardCharsets.UTF_8);
          if (!put(key, field, entry.getValue(), result)) {
            return Status.UNEXPECTED_STATE;
          }
        }
        return Status.OK;
      }
      List<String> names = new ArrayList<>(fields);
      byte[][] wanted = names.stream().map(RedisClient::bytes).toArray(byte[][]::new);
      List<byte[]> values = jedis.hmget(bytes(key), wanted);
      for (int i = 0; i < names.size(); i++) {
        if (values.get(i) == null) {
          return Status.NOT_FOUND;
        }
        if (!put(key, names.get(i), values.get(i), result)) {
          return Status.UNEXPECTED_STATE;
        }
      }
      return Status.OK;
    } catch (JedisException e) {
      System.err.println("redis read of " + key + " failed: " + e);
      return Status.ERROR;
    }
  }

  private static boolean put(String key, String field, byte[] stored, Map<String, ByteIterator> result) {
    String value = Envelope.open(key, field, stored);
    if (value == null) {
      System.err.println("WRONG BYTES: the envelope of " + key + " " + field + " is damaged");
      return false;
    }
    result.put(field, new StringByteIterator(value));
    return true;
  }

  @Override
  public Status insert(String table, String key, Map<String, ByteIterator> values) {
    return update(table, key, values);
  }

  @Override
  public Status update(String table, String key, Map<String, ByteIterator> values) {
    Map<byte[], byte[]> hash = new HashMap<>();
    values.forEach((field, value) -> hash.put(bytes(field), Envelope.close(key, field, value.toString())));
    try {
      jedis.hset(bytes(key), hash);
      return Status.OK;
    } catch (JedisException e) {
      System.err.println("redis write of " + key + " failed: " + e);
      return Status.ERROR;
    }
  }

  @Override
  public Status delete(String table, String key) {
    try {
      return jedis.del(bytes(key)) == 1 ? Status.OK : Status.NOT_FOUND;
    } catch (JedisException e) {
      return Status.ERROR;
    }
  }

  @Override
  public Status scan(String table, String start, int count, Set<String> fields, Vector<HashMap<String, ByteIterator>> out) {
    return Status.NOT_IMPLEMENTED;
  }

  static byte[] bytes(String text) {
    return text.getBytes(StandardCharsets.UTF_8);
  }
}
