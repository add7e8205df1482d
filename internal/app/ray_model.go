package app

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/dpserve/dpserve/internal/engineflags"
)

// rayModel is one LLMConfig while it becomes an application, or a pool of one.
type rayModel struct {
	f       *rayFile
	c       cursor
	builder string
	over    map[string]*rayOverride
	app     *node  // our application
	index   int    // of app
	side    string // PoolPrefill, PoolDecode, or "" for an application with one pool

	replicas, dpSize int // 0: not written
	sizeAt           cursor
}

func (f *rayFile) model(c cursor, builder string, over map[string]*rayOverride) *rayModel {
	return &rayModel{
		f: f, c: c, builder: builder, over: over, index: len(f.out), sizeAt: c,
		app: &node{place: c.n.place, shape: mapShape, size: 1},
	}
}

// finish adds the application.
func (f *rayFile) finish(m *rayModel) {
	f.origins[index("applications", m.index)] = m.c.path
	f.out = append(f.out, m.app)
}

func (m *rayModel) skip(cursor) {}

func (m *rayModel) note(c cursor, message, hint string) {
	m.f.d.warnAt(c.n.place, c.path, message, hint)
}

func (m *rayModel) unused(c cursor, why string) { m.note(c, "has no effect: "+why, "") }

func (m *rayModel) id() string {
	if n := m.c.sub("model_loading_config").n; n != nil && n.get("model_id") != nil {
		return n.get("model_id").text
	}
	return ""
}

// convert writes the application, or its pool.
func (m *rayModel) convert(name, route string) {
	name = cmp.Or(name, m.id())
	if label := Label(name, "app"); m.side != PoolDecode {
		m.put(m.c, label, textShape, "name")
		m.put(m.c, route, textShape, "route_prefix")
		if label != name {
			m.note(m.c, "the application is called "+label+" here", "")
		}
	}
	m.f.readKeys(m, m.c, rayModelKeys(), true)
	if m.id() == "" {
		m.c.refuse(Fault{
			Message: "the key model_loading_config.model_id is missing",
			Hint:    "it is what clients send as \"model\"",
		})
	}
	if m.app.get("engine").sub("kind") == nil {
		m.put(m.c, string(KindVLLM), textShape, "engine", "kind")
	}
	m.readDeployment()
	m.writeSizes()
	m.checkPair()
}

// own returns the path of a key that each pool has for itself.
func (m *rayModel) own(keys ...string) []string {
	if m.side != "" {
		return append([]string{m.side}, keys...)
	}
	return keys
}

// set writes a value of the file at a key of ours.
func (m *rayModel) set(c cursor, keys ...string) {
	at, path := m.app, index("applications", m.index)
	for i, key := range keys {
		path = join(path, key)
		if i == len(keys)-1 {
			at.entries = slices.DeleteFunc(at.entries, func(e entry) bool { return e.key == key })
			at.add(entry{c.n.place, key, c.n})
			break
		}
		next := at.get(key)
		if next == nil {
			next = &node{place: m.c.n.place, shape: mapShape, size: 1}
			at.add(entry{next.place, key, next})
		}
		at = next
	}
	m.f.origins[path] = c.path
}

// put writes a value that follows from one of the file.
func (m *rayModel) put(from cursor, text string, s shape, keys ...string) {
	from.n = &node{place: from.n.place, shape: s, text: text, quoted: s == textShape, size: 1}
	m.set(from, keys...)
}

// setShared writes a value that both pools of an application have in common.
func (m *rayModel) setShared(c cursor, key string) {
	if was := m.app.get(key); m.side == PoolDecode && was != nil && was.text != c.n.text {
		m.note(c, "holds for prefill ranks too: "+key+" is one value of the application", "")
	}
	keys := []string{key}
	if key == "max_ranks_per_node" {
		keys = m.own(key)
	}
	m.set(c, keys...)
}

func (m *rayModel) readLoading(c cursor) {
	m.f.readKeys(m, c, []rayKey{
		{name: "model_id", read: func(m *rayModel, c cursor) { m.set(c, "model", "id") }},
		{name: "model_source", read: (*rayModel).readSource},
		{name: "tokenizer_source", read: func(m *rayModel, c cursor) {
			m.set(c, m.own("engine", "args", "tokenizer")...)
		}},
	}, true)
}

func (m *rayModel) readSource(c cursor) {
	if c.n.shape == mapShape {
		if extra := c.sub("extra_files"); extra.n != nil {
			m.unused(extra, "dpserve copies no files")
		}
		if c = c.sub("bucket_uri"); c.n == nil {
			return
		}
	}
	scheme, _, isRemote := strings.Cut(c.n.text, "://")
	if isRemote && !slices.Contains([]string{"s3", "gs", "az"}, scheme) {
		c.refuse(Fault{
			Message: "vLLM cannot load a model from " + scheme + "://", Wanted: "s3://, gs:// or az://",
			Hint: "copy the model to a folder of each node and write its path",
		})
		return
	}
	if isRemote {
		m.note(c, "the engine loads the model from the bucket itself", "it needs the extra runai of vLLM")
	}
	m.set(c, "model", "source")
}

func (m *rayModel) readEngine(c cursor) {
	kind := strings.ToLower(c.n.text)
	if kind != string(KindVLLM) && kind != string(KindSGLang) {
		c.refuseValue("vLLM | SGLang", "")
		return
	}
	m.put(c, kind, textShape, "engine", "kind")
}

func (m *rayModel) readKwargs(c cursor) {
	if !c.isMap(nil) {
		return
	}
	for _, e := range c.n.entries {
		m.readKwarg(c.key(e), e)
	}
}

func (m *rayModel) readKwarg(c cursor, e entry) {
	flag := strings.ReplaceAll(e.key, "_", "-")
	owned, isOwned := engineflags.FindOwned(flag)
	switch {
	case e.key == "data_parallel_size":
		if size, ok := c.n.whole(); ok && size > 0 && size <= MaxDPSize {
			m.dpSize, m.sizeAt = int(size), c
			return
		}
		c.refuseValue("an integer from 1 to "+strconv.Itoa(MaxDPSize), "it is the number of ranks of a group")
	case e.key == "model" || e.key == "served_model_name":
		m.f.d.fault(e.place, c.path, Fault{
			Message: e.key + " of the engine is that of model_loading_config", Hint: "leave it out",
		})
	case e.key == "kv_transfer_config" && m.side != "":
		m.readTransfer(c)
	case e.key == "distributed_executor_backend" && c.n.text == "ray":
		m.unused(c, "there is no Ray cluster; the engine picks its own")
	case e.key == "disable_log_stats" && c.n.shape == boolShape && c.n.truth() && m.wantsMetrics():
		m.f.d.fault(e.place, c.path, Fault{
			Message: "disable_log_stats contradicts log_engine_metrics: true", Hint: "leave one of them out",
		})
	case isOwned && (!owned.OnlyOn || c.n.shape != boolShape || !c.n.truth()):
		m.note(c, "has no effect: "+cmp.Or(owned.Why, "dpserve sets it itself"), owned.InFile)
	default:
		m.readFlag(c, e, flag)
	}
}

func (m *rayModel) wantsMetrics() bool {
	n := m.c.sub("log_engine_metrics").n
	return n != nil && n.truth()
}

// readFlag passes a flag on. It refuses mistyped ones, as Ray Serve refuses all that its vLLM does not have.
func (m *rayModel) readFlag(c cursor, e entry, flag string) {
	if engineflags.Find(engineflags.VLLM, flag) == engineflags.Unknown {
		if meant := didYouMean(flag, engineflags.Names(engineflags.VLLM)); meant != "" {
			m.f.d.fault(e.place, c.path, Fault{
				Message: "unknown engine argument " + strconv.Quote(e.key),
				Hint:    strings.ReplaceAll(meant, "-", "_"),
			})
			return
		}
	}
	if e.value.shape != nullShape {
		m.set(c, m.own("engine", "args", e.key)...)
	}
}

// readTransfer reads the kv_transfer_config of a pool.
func (m *rayModel) readTransfer(c cursor) {
	connector := c.sub("kv_connector")
	if connector.n == nil {
		c.refuse(Fault{
			Message: "the key kv_connector is missing",
			Wanted:  "NixlConnector | MooncakeConnector",
		})
		return
	}
	transfer := rayTransfers()[connector.n.text]
	if transfer == "" {
		m.note(connector, "blocks go by NIXL here: dpserve has no transfer "+connector.n.describe(),
			"settings of this connector, also in env_vars, have no effect")
		m.put(connector, TransferNIXL, textShape, "disaggregation", "transfer")
		return
	}
	m.put(connector, transfer, textShape, "disaggregation", "transfer")
	for _, e := range c.n.entries {
		switch e.key {
		case "kv_connector":
		case "kv_role", "engine_id":
			m.unused(c.key(e), "dpserve sets it for each engine")
		default:
			m.set(c.key(e), m.own("engine", "args", "kv_transfer_config", e.key)...)
		}
	}
}

// checkPair refuses a side of a pair without transfer.
func (m *rayModel) checkPair() {
	if m.side != "" && m.c.sub("engine_kwargs").n.sub("kv_transfer_config") == nil {
		m.c.refuse(Fault{
			Message: "the side has no engine_kwargs.kv_transfer_config",
			Hint:    "write kv_transfer_config: {kv_connector: NixlConnector, kv_role: kv_both}",
		})
	}
}

// sub is get that takes a missing map.
func (n *node) sub(key string) *node {
	if n == nil {
		return nil
	}
	return n.get(key)
}

// writeSizes writes what num_replicas and data_parallel_size mean together, as Foreign.RayReplicas says.
func (m *rayModel) writeSizes() {
	number := func(n int, keys ...string) { m.put(m.sizeAt, strconv.Itoa(n), intShape, m.own(keys...)...) }
	if m.dpSize <= 1 {
		number(max(1, m.replicas), "data_parallel", "dp_size")
		m.put(m.sizeAt, string(Independent), textShape, m.own("data_parallel", "coupling")...)
		return
	}
	number(m.dpSize, "data_parallel", "dp_size")
	m.put(m.sizeAt, string(Lockstep), textShape, m.own("data_parallel", "coupling")...)
	groups := max(1, m.replicas)
	switch counts := m.f.d.foreign.RayReplicas; {
	case counts == RayRanks && m.replicas > 0:
		number(m.replicas, "num_replicas")
		return
	case counts == "" && groups == m.dpSize:
		groups = 1
		m.note(m.sizeAt,
			"num_replicas = data_parallel_size is read as one group, as Ray Serve before 2.55 did",
			"--ray-num-replicas "+RayGroups+" reads it as the number of groups")
	default:
		m.note(m.sizeAt, "read as lockstep ranks, "+strconv.Itoa(m.dpSize)+" a group; number of groups: "+
			strconv.Itoa(groups),
			"for a dense model write coupling: independent")
	}
	number(groups, "num_groups")
}
