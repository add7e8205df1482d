package app

// Sample returns a documented file that has every key of this version and parses without faults or warnings.
func Sample() []byte { return []byte(sample) }

const sample = `# An application file of dpserve. Only name, model.id and engine.kind are needed; everything else has a default.
applications:
  - name: chat                         # a DNS label, unique; names the application in commands, metrics and headers
    route_prefix: /                    # "/" may be shared (the model field picks the application), other prefixes are unique
    model:
      id: demo                         # what clients send as "model"; ids and aliases are unique
      source: demo                     # what the engine loads; default: id
      aliases: [demo-latest]           # further names
      adapters:                        # served as "demo:my-lora" and "my-lora"
        - {id: my-lora, source: /models/my-lora}
    engine:
      kind: sim                        # sim (built in, needs no GPU) | vllm | sglang | attach
      command: []                      # default by kind
      args: {max_num_seqs: 64}         # passed on: snake or kebab case, true = bare flag, false = --no-flag, lists and maps = JSON
      env: {TZ: UTC}                   # environment variables of the engine
      kv_events: auto                  # auto | off
      startup_timeout_s: 600           # from start to ready
      stall_timeout_s: 20              # no progress with work in flight
    data_parallel:
      dp_size: 4                       # ranks of a group
      coupling: independent            # independent (every rank a whole server) | lockstep (the group fails and restarts as one)
    num_replicas: 8                    # ranks in all = dp_size × num_groups; one of the two may be left out
    num_groups: 2
    resources:                         # per rank
      gpus: 0
      cpus: 1
      memory_gib: 0.5
      labels: {}                       # must match the node's labels
    placement_group_strategy: PACK     # PACK | STRICT_PACK | SPREAD | STRICT_SPREAD
    max_ranks_per_node: 8
    routing:
      policy: mex                      # docs/routing.md lists them all; lmetric-1 is the default of lockstep groups
      preset: documented               # documented | tuned
      params: {ttft_s: 2, tpot_s: 0.05}  # the policy's own knobs: here the goals for the first token and the tokens after it
      identity: text                   # text | tokens: how a prompt becomes blocks
      busy_threshold: 0.95             # 0 to 1: ranks whose KV cache is fuller get nothing; default: no threshold
    max_ongoing_requests: 64           # per rank; default: what the engine reports, else 256
    max_queued_requests: 1000          # then 503
    timeouts: {queue_s: 60, first_token_s: 300, between_tokens_s: 30}
    retries: {attempts: 3}             # before the first byte, on other ranks
    health_check_period_s: 1
    health_check_timeout_s: 5
    graceful_shutdown_timeout_s: 1800  # drain of running streams; 0 = cut
  - name: edge                         # one endpoint in front of engines that someone else runs
    model: {id: qwen}
    autoscaling_config: null           # accepted with min_replicas = max_replicas and then means num_replicas
    engine:
      kind: attach
      family: vllm                     # vllm | sglang | openai; default: probed
      ranks:
        - {url: "http://127.0.0.1:8100", group: 0, role: both, node: node-1}
        - {url: "http://127.0.0.1:8101", kv_events: {connect: "tcp://127.0.0.1:5557", replay: "tcp://127.0.0.1:5558"}}
        - {url: "http://127.0.0.1:8102", addressing: header, selector: 3, kv_events: {bind: "tcp://127.0.0.1:5567"}}
        - {url: "http://127.0.0.1:8104", rank: 4}   # its number, where a removed rank has left a hole; default: its place here
`
