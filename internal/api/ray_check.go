package api

import (
	"errors"
	"fmt"
	"strings"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/problem"
)

// rayCheck collects the faults of a Ray Serve document that Ray itself refuses, all at once, each as its path
// and a sentence. Keys that Ray does not know pass, as in Ray.
type rayCheck struct{ faults []string }

func (k *rayCheck) fault(path, format string, args ...any) {
	k.faults = append(k.faults, path+": "+fmt.Sprintf(format, args...))
}

// parseError adds the faults that dpserve finds in the entry i.
func (k *rayCheck) parseError(i int, err error) {
	var faults app.Faults
	if !errors.As(err, &faults) {
		k.fault(fmt.Sprintf("applications[%d]", i), "%v", err)
		return
	}
	for _, f := range faults {
		text := f.Describe()
		if f.Hint != "" {
			text += "; hint: " + f.Hint
		}
		k.fault(pathOfEntry(f.Path, i), "%s", text)
	}
}

func (k *rayCheck) err() error {
	if len(k.faults) == 0 {
		return nil
	}
	return problem.New(problem.InvalidArgument, "faults in the document: %d", len(k.faults)).
		WithHint("nothing has changed; correct them and send it again").
		WithDetails(k.faults...)
}

// document checks a whole document and returns it with its applications.
func (k *rayCheck) document(root any) (document map[string]any, applications []map[string]any) {
	document, ok := root.(map[string]any)
	if !ok {
		k.fault("document", "wanted a JSON object")
		return nil, nil
	}
	k.isWord(document, "proxy_location", "Disabled", "HeadOnly", "EveryNode")
	if v, has := document["target_capacity"]; has && v != nil {
		if n, isNumber := v.(float64); !isNumber || n < 0 || n > 100 {
			k.fault("target_capacity", "found %v, wanted a number from 0 to 100", v)
		}
	}
	list, ok := document["applications"].([]any)
	if !ok {
		k.fault("applications", "wanted a list of applications; an empty one deletes all")
		return document, nil
	}
	names, prefixes := map[any]bool{}, map[any]bool{}
	for i, item := range list {
		path := fmt.Sprintf("applications[%d]", i)
		entry, ok := item.(map[string]any)
		if !ok {
			k.fault(path, "wanted an object")
			continue
		}
		k.application(path, entry)
		k.unique(path, "name", "default", entry, names)
		// dpserve's own applications may share a prefix
		if module, isRay := entry["import_path"]; isRay && module != rayImportPath {
			k.unique(path, "route_prefix", "/", entry, prefixes)
		}
		applications = append(applications, entry)
	}
	return document, applications
}

// unique checks that no earlier application has this one's value of key. A null is unlike any other.
func (k *rayCheck) unique(path, key, unset string, entry map[string]any, seen map[any]bool) {
	value, has := entry[key]
	if !has {
		value = unset
	}
	text, isText := value.(string)
	switch {
	case value == nil:
	case !isText:
		k.fault(path+"."+key, "wanted a string")
	case seen[text]:
		k.fault(path+"."+key, "%q is that of another application", text)
	default:
		seen[text] = true
	}
}

func (k *rayCheck) application(path string, entry map[string]any) {
	for _, key := range []string{"host", "port"} {
		if _, has := entry[key]; has {
			k.fault(path+"."+key, "it belongs at the top of the document, under http_options")
		}
	}
	value, has := entry["import_path"]
	importPath, isText := value.(string)
	_, isOwn := entry["model"]
	switch {
	case !has && isOwn:
		return
	case !has:
		k.fault(path+".import_path", "it is missing; dpserve's own form has model and engine instead")
	case !isText || !strings.ContainsAny(importPath, ".:"):
		k.fault(path+".import_path", "found %v, wanted module:name", value)
	}
	if env, isMap := entry["runtime_env"].(map[string]any); isMap {
		if dir, isText := env["working_dir"].(string); isText && !strings.Contains(dir, "://") {
			k.fault(path+".runtime_env.working_dir", "found %q, wanted a URI", dir)
		}
	}
	if v, has := entry["deployments"]; has {
		k.deployments(path+".deployments", v)
	}
}

func (k *rayCheck) deployments(path string, v any) {
	list, ok := v.([]any)
	if !ok {
		k.fault(path, "wanted a list")
		return
	}
	for i, item := range list {
		at := fmt.Sprintf("%s[%d]", path, i)
		d, ok := item.(map[string]any)
		if !ok {
			k.fault(at, "wanted an object")
			continue
		}
		k.deployment(at, d)
	}
}

func (k *rayCheck) deployment(path string, d map[string]any) {
	replicas, has := d["num_replicas"]
	if has && replicas != nil && replicas != "auto" && !isPositive(replicas) {
		k.fault(path+".num_replicas", `found %v, wanted an integer above 0, or "auto"`, replicas)
	}
	if v, has := d["max_ongoing_requests"]; has && !isPositive(v) {
		k.fault(path+".max_ongoing_requests", "found %v, wanted an integer above 0", v)
	}
	if d["autoscaling_config"] != nil && isPositive(replicas) {
		k.fault(path, "num_replicas and autoscaling_config exclude each other")
	}
	gang, _ := d["gang_scheduling_config"].(map[string]any)
	if gang == nil {
		return
	}
	size, _ := gang["gang_size"].(float64)
	count, _ := replicas.(float64)
	if isPositive(size) && isPositive(count) && int64(count)%int64(size) != 0 {
		k.fault(path+".num_replicas", "%v is no multiple of gang_size %v", count, size)
	}
	if _, has := d["placement_group_strategy"]; has {
		k.fault(path+".placement_group_strategy", "gangs take gang_scheduling_config.gang_placement_strategy")
	}
}

// isPositive reports whether a value of JSON is an integer above 0.
func isPositive(v any) bool {
	n, ok := v.(float64)
	return ok && n >= 1 && n == float64(int64(n))
}

// isWord checks that the value of key, if there is one, is one of words.
func (k *rayCheck) isWord(m map[string]any, key string, words ...string) {
	v, has := m[key]
	if !has || v == nil {
		return
	}
	for _, w := range words {
		if v == w {
			return
		}
	}
	k.fault(key, "found %v, wanted %s", v, strings.Join(words, ", "))
}
