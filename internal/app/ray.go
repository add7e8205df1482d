package app

import (
	"slices"
	"strconv"
	"strings"
)

// A file for Ray Serve LLM is converted into the tree of our own file, whose values keep their positions. The
// rules of an application then hold for it as for any other. ray_keys.go says what a key means here.

// foreignRay is File.Foreign of these files.
const foreignRay = "Ray Serve"

// isRay reports whether a file is one of Ray Serve, or the configuration of one model of it.
func isRay(root *node) bool {
	if root.get("model_loading_config") != nil {
		return true
	}
	apps := root.get("applications")
	return apps != nil && slices.ContainsFunc(apps.items, func(a *node) bool {
		return a.get("import_path") != nil
	})
}

// rayFile is a file that is being converted.
type rayFile struct {
	d       *decoder
	out     []*node // our applications
	origins map[string]string
	besides int // bytes of model files
}

// convertRay returns the tree of our own file. Keys without effect are warnings.
func (d *decoder) convertRay(root *node) *node {
	d.tool = foreignRay
	f := &rayFile{d: d, origins: map[string]string{}}
	whole := cursor{d, root, ""}
	if root.get("model_loading_config") != nil {
		f.readBare(whole)
	} else {
		f.readKeys(nil, whole, rayFileKeys(), false)
		for i, a := range root.get("applications").items {
			f.readApp(cursor{d, a, index("applications", i)})
		}
	}
	d.origins = f.origins
	list := &node{place: root.place, shape: listShape, size: 1, items: f.out}
	out := &node{place: root.place, shape: mapShape, size: 1}
	out.add(entry{root.place, "applications", list})
	return out
}

// readBare reads a file that is the configuration of one model.
func (f *rayFile) readBare(c cursor) {
	m := f.model(c, "build_openai_app", nil)
	m.convert("", "/")
	f.finish(m)
}

// rayBuilders lists the keys of a builder's args that have its models.
func rayBuilders() map[string][]string {
	return map[string][]string{
		"build_openai_app": {"llm_configs"}, "build_dp_openai_app": {"llm_config"},
		"build_pd_openai_app":  {"prefill_config", "decode_config"},
		"build_llm_deployment": {"llm_config"}, "build_dp_deployment": {"llm_config"},
	}
}

func (f *rayFile) readApp(c cursor) {
	if !c.isMap(nil) {
		return
	}
	f.readKeys(nil, c, rayAppKeys(), false)
	path := c.sub("import_path")
	if path.n == nil {
		c.refuse(Fault{
			Message: "the key import_path is missing",
			Hint:    "an application of Ray Serve has one",
		})
		return
	}
	builder := path.n.text[strings.LastIndexAny(path.n.text, ":.")+1:]
	keys := rayBuilders()[builder]
	if keys == nil || !strings.HasPrefix(path.n.text, "ray.") {
		path.refuse(Fault{
			Message: "dpserve runs no Python: found import_path " + path.n.describe(),
			Wanted:  "ray.serve.llm: build_openai_app | build_dp_openai_app | build_pd_openai_app",
			Hint:    "write the application as docs/app-yaml.md shows",
		})
		return
	}
	args := c.sub("args")
	if args.n == nil {
		path.refuse(Fault{Message: builder + " needs args", Hint: "write args: {" + keys[0] + ": …}"})
		return
	}
	if !args.isMap(nil) {
		return
	}
	own := rayArgKeys()
	for _, key := range keys {
		own = append(own, rayKey{name: key, read: (*rayModel).skip})
		if args.sub(key).n == nil {
			args.refuse(Fault{
				Message: "the key " + key + " is missing",
				Hint:    builder + " reads " + strings.Join(keys, " and "),
			})
		}
	}
	f.readKeys(nil, args, own, true)
	models := f.models(args, keys)
	if len(models) == 0 || len(f.d.faults) > 0 {
		return
	}
	f.readModels(c, builder, models)
}

// readModels makes our applications of those of an application of Ray's.
func (f *rayFile) readModels(c cursor, builder string, models []cursor) {
	overrides := f.overrides(c)
	name, prefix := "default", "/"
	if n := c.sub("name").n; n != nil {
		name = n.text
	}
	if n := c.sub("route_prefix").n; n != nil && n.shape != nullShape {
		prefix = n.text
	}
	ids := map[string]bool{}
	var first *rayModel
	for i, one := range models {
		m := f.model(one, builder, overrides)
		if env := c.sub("runtime_env"); env.n != nil {
			m.readEnv(env)
		}
		id := m.id()
		switch {
		case builder == "build_pd_openai_app" && i == 0:
			m.side = PoolPrefill
		case builder == "build_pd_openai_app":
			m.side, m.app, m.index = PoolDecode, first.app, first.index
			if was := first.id(); was != id {
				one.refuse(Fault{
					Message: "prefill and decode serve one model: found " + was + " and " + id,
					Hint:    "write the same model_id on both sides",
				})
			}
		case ids[id]:
			one.refuse(Fault{
				Message: "model_id " + id + " is used twice",
				Hint:    "each model needs an id of its own",
			})
		}
		ids[id] = true
		appName := name
		if len(models) > 1 && m.side == "" {
			appName += "-" + id
		}
		if first == nil {
			first = m
		}
		m.convert(appName, prefix)
		if m.side != PoolDecode {
			f.finish(m)
		}
	}
	for name, o := range overrides {
		if !o.used {
			o.c.warnOrRefuse(name)
		}
	}
}

// rayOverride is an entry of `deployments`: what holds instead of a model's deployment_config.
type rayOverride struct {
	c    cursor
	used bool
}

func (f *rayFile) overrides(c cursor) map[string]*rayOverride {
	out := map[string]*rayOverride{}
	list := c.sub("deployments")
	if list.n == nil {
		return out
	}
	list.each(maxListItems, func(item cursor) {
		if name := item.sub("name").n; name != nil {
			out[name.text] = &rayOverride{c: item}
		}
	})
	return out
}

// warnOrRefuse is what becomes of an override that no model has.
func (c cursor) warnOrRefuse(name string) {
	if strings.HasPrefix(name, "OpenAiIngress") {
		c.d.warnAt(c.n.place, c.path, "has no effect: the endpoint of each node is the ingress", "")
		return
	}
	c.refuse(Fault{
		Message: "no deployment has the name " + strconv.Quote(name),
		Hint:    "Ray Serve names them LLMServer:MODEL, DPServer:MODEL, Prefill:MODEL and Decode:MODEL",
	})
}

// models returns the configurations of the models, from the file itself or from the files that it names.
func (f *rayFile) models(args cursor, keys []string) []cursor {
	var out []cursor
	for _, key := range keys {
		c := args.sub(key)
		switch {
		case c.n == nil:
		case key != "llm_configs":
			out = append(out, f.open(c))
		case c.n.shape == listShape && len(c.n.items) == 0:
			c.refuse(Fault{Found: "an empty list", Wanted: "at least one model"})
		default:
			c.each(maxListItems, func(item cursor) { out = append(out, f.open(item)) })
		}
	}
	return slices.DeleteFunc(out, func(c cursor) bool { return c.n.shape != mapShape })
}

// open returns a configuration, which may be the path of a file.
func (f *rayFile) open(c cursor) cursor {
	if c.n.shape != textShape {
		c.isMap(nil)
		return c
	}
	if f.d.foreign.Beside == nil {
		c.refuse(Fault{
			Message: "the model file " + strconv.Quote(c.n.text) + " is not at hand",
			Hint:    "dpserve deploy reads it; or write its content here",
		})
		return c
	}
	text, err := f.d.foreign.Beside(c.n.text)
	if f.besides += len(text); err != nil || f.besides > MaxFileBytes {
		message := "the model files have more than " + strconv.Itoa(MaxFileBytes) + " bytes together"
		if err != nil {
			message = "cannot read the model file " + strconv.Quote(c.n.text) + ": " + err.Error()
		}
		c.refuse(Fault{Message: message, Hint: "paths begin at the folder of this file"})
		return c
	}
	sub := newDecoder(c.n.text)
	root := sub.load(text)
	f.d.faults = append(f.d.faults, sub.faults...)
	if root == nil {
		if len(sub.faults) == 0 {
			c.refuse(Fault{Message: "the model file " + strconv.Quote(c.n.text) + " holds nothing"})
		}
		return c
	}
	root.setFile(c.n.text)
	out := cursor{f.d, root, ""}
	out.isMap(nil)
	return out
}

func (n *node) setFile(name string) {
	if n.file != "" {
		return // an alias
	}
	n.file = name
	for _, item := range n.items {
		item.setFile(name)
	}
	for i := range n.entries {
		n.entries[i].file = name
		n.entries[i].value.setFile(name)
	}
}

// readKeys reads a map by its table. Unknown keys are faults in a closed map, and warnings in others: Ray
// Serve drops them without a word.
func (f *rayFile) readKeys(m *rayModel, c cursor, keys []rayKey, isClosed bool) {
	if !c.isMap(nil) {
		return
	}
	var names []string
	for _, k := range keys {
		names = append(names, k.name)
	}
	for _, e := range c.n.entries {
		item := c.key(e)
		i := slices.IndexFunc(keys, func(k rayKey) bool { return k.name == e.key })
		switch {
		case i < 0 && isClosed:
			f.d.fault(e.place, item.path, Fault{
				Message: "Ray Serve has no key " + strconv.Quote(e.key) + " here",
				Hint:    didYouMean(e.key, names),
			})
		case i < 0:
			f.d.warnAt(e.place, item.path, "has no effect: neither Ray Serve nor dpserve knows it",
				didYouMean(e.key, names))
		case keys[i].wrong != "":
			f.d.fault(e.place, item.path, Fault{Message: keys[i].wrong, Hint: keys[i].hint})
		case keys[i].unused != "":
			f.d.warnAt(e.place, item.path, "has no effect: "+keys[i].unused, "")
		case e.value.shape == nullShape:
		case keys[i].to != "":
			m.setShared(item, keys[i].to)
		default:
			keys[i].read(m, item)
		}
	}
}

// sub returns the value of a key; its node is nil if the map has no such key.
func (c cursor) sub(key string) cursor { return cursor{c.d, c.n.get(key), join(c.path, key)} }
